/* Keys and values in a paged cache: writing them, and attending over them with one query per token.

   A cache has slots of `kv_heads` heads of `size`; slot = block * block_size + offset. Row r of `table` names the
   blocks of a sequence in order. */

#include <stdlib.h>
#include <string.h>

#include "kernels.h"

/* Token t's keys and values, `stride` numbers apart, go to slot `slots[t]`. */
void write_cache(const float *keys, long key_stride, const float *values, long value_stride, const int64_t *slots,
                 long tokens, long width, float *key_cache, float *value_cache)
{
    for (long t = 0; t < tokens; t++) {
        memcpy(key_cache + slots[t] * width, keys + t * key_stride, width * sizeof(float));
        memcpy(value_cache + slots[t] * width, values + t * value_stride, width * sizeof(float));
    }
}

/* Token t, of the sequence in row `rows[t]` of `table`, attends over its places 0 to `positions[t]`, the longest of
   which is `longest`. `queries` are rows, `stride` numbers apart, of `heads` heads. With few tokens, threads share
   one by its kv heads. Returns 0, or 1 where there is no memory for the scores. */
int attend_cache(const float *queries, long stride, const float *keys, const float *values, const int64_t *table,
                 long table_stride, const int64_t *rows, const int64_t *positions, long tokens, long heads,
                 long kv_heads, long size, long block_size, long longest, float *out, int threads)
{
    struct cache cache = {keys, values, block_size, kv_heads * size};
    long group = heads / kv_heads, parts = tokens < threads ? kv_heads : 1;
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float *scores = malloc((longest + 1) * heads / parts * sizeof(float));
        if (!scores) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for collapse(2) schedule(dynamic)
        for (long t = 0; t < tokens; t++) {
            for (long part = 0; part < parts; part++) {
                const int64_t *blocks = table + rows[t] * table_stride;
                const int64_t *next = table + rows[t + 1 < tokens ? t + 1 : t] * table_stride;
                struct span span = {blocks, positions[t] + 1, part * kv_heads / parts, (part + 1) * kv_heads / parts,
                                    keys + *next * block_size * cache.width};
                if (scores)
                    attend_token(cache, span, group, size, queries + t * stride, scores, out + t * heads * size);
            }
        }
        free(scores);
    }
    return failed;
}
