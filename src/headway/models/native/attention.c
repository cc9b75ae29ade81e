/* Keys and values in a paged cache: writing them, and attending over them with one query per token.

   A cache has slots of `kv_heads` heads of `size`; slot = block * block_size + offset. Row r of `table` names the
   blocks of a sequence in order. */

#include <stdlib.h>

#include "exp.h"
#include "kernels.h"

#define LINE 16

/* Token t's keys and values, `stride` numbers apart, go to slot `slots[t]`. */
void write_cache(const float *keys, long key_stride, const float *values, long value_stride, const int64_t *slots,
                 long tokens, long width, float *key_cache, float *value_cache)
{
    for (long t = 0; t < tokens; t++) {
        memcpy(key_cache + slots[t] * width, keys + t * key_stride, width * sizeof(float));
        memcpy(value_cache + slots[t] * width, values + t * value_stride, width * sizeof(float));
    }
}

/* Scores become weights that add up to 1; all NaN where a score is not finite. */
static void softmax(float *restrict scores, long count)
{
    float highest = highest_of(scores, count), sum = 0;
    for (long p = 0; p < count; p++) {
        scores[p] = exp_float(scores[p] - highest);
        sum += scores[p];
    }
    float share = isnan(highest) ? NAN : 1 / sum;
    for (long p = 0; p < count; p++)
        scores[p] *= share;
}

/* The scores of `count` neighbouring places. Four at a time, so that a vector of the query serves four keys.
   `size` is a constant wherever this and `add_values` are inlined. */
static inline __attribute__((always_inline)) void score_keys(const float *query, const float *keys, long count,
                                                             long width, long size, float scale,
                                                             float *restrict scores)
{
    long p = 0;
    for (; p + 4 <= count; p += 4) {
        const float *k0 = keys + p * width, *k1 = k0 + width, *k2 = k1 + width, *k3 = k2 + width;
        float s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        for (long i = 0; i < size; i++) {
            s0 += query[i] * k0[i];
            s1 += query[i] * k1[i];
            s2 += query[i] * k2[i];
            s3 += query[i] * k3[i];
        }
        scores[p] = s0 * scale;
        scores[p + 1] = s1 * scale;
        scores[p + 2] = s2 * scale;
        scores[p + 3] = s3 * scale;
    }
    for (; p < count; p++) {
        float sum = 0;
        for (long i = 0; i < size; i++)
            sum += query[i] * keys[p * width + i];
        scores[p] = sum * scale;
    }
}

/* Adds the values of `count` neighbouring places, each times its weight, to `mixed`. */
static inline __attribute__((always_inline)) void add_values(const float *weights, const float *values, long count,
                                                             long width, long size, float *restrict mixed)
{
    long p = 0;
    for (; p + 4 <= count; p += 4) {
        const float *v0 = values + p * width, *v1 = v0 + width, *v2 = v1 + width, *v3 = v2 + width;
        float w0 = weights[p], w1 = weights[p + 1], w2 = weights[p + 2], w3 = weights[p + 3];
        for (long i = 0; i < size; i++)
            mixed[i] += w0 * v0[i] + w1 * v1[i] + w2 * v2[i] + w3 * v3[i];
    }
    for (; p < count; p++)
        for (long i = 0; i < size; i++)
            mixed[i] += weights[p] * values[p * width + i];
}

static inline const float *block_of(const float *cached, struct cache cache, struct span span, long block)
{
    return cached + span.blocks[block] * cache.block_size * cache.width;
}

/* Ask for one of `parts` of a block ahead of its use: blocks lie anywhere, so the processor can't guess the next. */
static inline void fetch_part(const float *block, struct cache cache, long part, long parts)
{
    long numbers = cache.block_size * cache.width;
    for (long i = numbers * part / parts; i < numbers * (part + 1) / parts; i += LINE)
        __builtin_prefetch(block + i);
}

/* Block by block, so that memory is read in its own order. */
static inline __attribute__((always_inline)) void attend_span(struct cache cache, struct span span, long group,
                                                              long size, const float *query, float *restrict scores,
                                                              float *restrict out)
{
    float scale = 1 / sqrtf((float)size);
    long first = span.first_head * group, heads = (span.last_head - span.first_head) * group;
    long last = (span.count - 1) / cache.block_size;
    for (long block = 0; block <= last; block++) {
        const float *keys = block_of(cache.keys, cache, span, block);
        const float *next = block < last ? block_of(cache.keys, cache, span, block + 1)
                                         : block_of(cache.values, cache, span, 0);
        long start = block * cache.block_size;
        long count = block < last ? cache.block_size : span.count - start;
        for (long head = 0; head < heads; head++) {
            fetch_part(next, cache, head, heads);
            score_keys(query + (first + head) * size, keys + (first + head) / group * size, count, cache.width, size,
                       scale, scores + head * span.count + start);
        }
    }
    for (long head = 0; head < heads; head++)
        softmax(scores + head * span.count, span.count);
    memset(out + first * size, 0, heads * size * sizeof(float));
    for (long block = 0; block <= last; block++) {
        const float *values = block_of(cache.values, cache, span, block);
        const float *next = block_of(cache.values, cache, span, block < last ? block + 1 : last);
        long start = block * cache.block_size;
        long count = block < last ? cache.block_size : span.count - start;
        for (long head = 0; head < heads; head++) {
            fetch_part(next, cache, head, heads);
            add_values(scores + head * span.count + start, values + (first + head) / group * size, count,
                       cache.width, size, out + (first + head) * size);
        }
    }
}

void attend(struct cache cache, struct span span, long group, long size, const float *query, float *scores,
            float *out)
{
    switch (size) {
    case 32: attend_span(cache, span, group, 32, query, scores, out); break;
    case 64: attend_span(cache, span, group, 64, query, scores, out); break;
    case 128: attend_span(cache, span, group, 128, query, scores, out); break;
    default: attend_span(cache, span, group, size, query, scores, out);
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
                struct span span = {table + rows[t] * table_stride, positions[t] + 1, part * kv_heads / parts,
                                    (part + 1) * kv_heads / parts};
                if (scores)
                    attend(cache, span, group, size, queries + t * stride, scores, out + t * heads * size);
            }
        }
        free(scores);
    }
    return failed;
}
