/* One token's attention over its sequence's blocks. */

#include "exp.h"
#include "kernels.h"
#include "vector.h"

#define LINE 16
/* Queries that share their keys and values are taken in pairs: each number that is loaded is used twice. */
#define PAIR 2
/* Places that are scored at once, and numbers of a head that stay in registers while values are added to them. */
#define PLACES 8
#define SLICE 32

#define INLINED static inline __attribute__((always_inline))

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

/* The scores of `places` neighbouring places, `stride` apart for each of `heads` queries. All of `heads`, `places` and
   `size` are constants wherever this is inlined; so are `heads` and `size` below. */
INLINED void score(const float *query, int heads, const float *keys, int places, long width, long size, float scale,
                   float *restrict scores, long stride)
{
    float sums[PAIR][PLACES] = {{0}};
    for (long i = 0; i < size; i++)
        for (int h = 0; h < heads; h++)
            for (int p = 0; p < places; p++)
                sums[h][p] += query[h * size + i] * keys[p * width + i];
    for (int h = 0; h < heads; h++)
        for (int p = 0; p < places; p++)
            scores[h * stride + p] = sums[h][p] * scale;
}

INLINED void score_block(const float *query, int heads, const float *keys, long count, long width, long size,
                         float *restrict scores, long stride)
{
    float scale = 1 / sqrtf((float)size);
    long p = 0;
    for (; p + PLACES <= count; p += PLACES)
        score(query, heads, keys + p * width, PLACES, width, size, scale, scores + p, stride);
    for (; p + PLACES / 2 <= count; p += PLACES / 2)
        score(query, heads, keys + p * width, PLACES / 2, width, size, scale, scores + p, stride);
    for (; p < count; p++)
        score(query, heads, keys + p * width, 1, width, size, scale, scores + p, stride);
}

/* Adds a slice of the values of `count` neighbouring places, each times its weight, to that of each head. */
INLINED void add_slice(const float *weights, long stride, int heads, const float *values, long count, long width,
                       long size, float *mixed)
{
    vector sums[PAIR][SLICE / LANES];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < SLICE / LANES; v++)
            sums[h][v] = load(mixed + h * size + v * LANES);
    for (long p = 0; p < count; p++)
        for (int h = 0; h < heads; h++)
            for (int v = 0; v < SLICE / LANES; v++)
                sums[h][v] += load(values + p * width + v * LANES) * weights[h * stride + p];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < SLICE / LANES; v++)
            store(mixed + h * size + v * LANES, sums[h][v]);
}

INLINED void add_block(const float *weights, long stride, int heads, const float *values, long count, long width,
                       long size, float *restrict mixed)
{
    long i = 0;
    for (; i + SLICE <= size; i += SLICE)
        add_slice(weights, stride, heads, values + i, count, width, size, mixed + i);
    for (long p = 0; p < count; p++)
        for (int h = 0; h < heads; h++)
            for (long rest = i; rest < size; rest++)
                mixed[h * size + rest] += weights[h * stride + p] * values[p * width + rest];
}

static inline const float *block_of(const float *cached, struct cache cache, struct span span, long block)
{
    return cached + span.blocks[block] * cache.block_size * cache.width;
}

/* Ask for one of `parts` of a block ahead of its use, into the second cache: blocks lie anywhere, so the processor
   can't guess the next. */
static inline void fetch_part(const float *block, struct cache cache, long part, long parts)
{
    long numbers = cache.block_size * cache.width;
    for (long i = numbers * part / parts; i < numbers * (part + 1) / parts; i += LINE)
        __builtin_prefetch(block + i, 0, 2);
}

/* Block by block, so that memory is read in its own order. */
INLINED void attend_sized(struct cache cache, struct span span, long group, long size, const float *query,
                          float *restrict scores, float *restrict out)
{
    long first = span.first_head * group, heads = (span.last_head - span.first_head) * group, stride = span.count;
    long last = (span.count - 1) / cache.block_size;
    query += first * size, out += first * size;
    for (long block = 0; block <= last; block++) {
        const float *keys = block_of(cache.keys, cache, span, block) + span.first_head * size;
        const float *next = block < last ? block_of(cache.keys, cache, span, block + 1)
                                         : block_of(cache.values, cache, span, 0);
        long start = block * cache.block_size, count = block < last ? cache.block_size : span.count - start;
        for (long head = 0, pair; head < heads; head += pair) {
            pair = head % group + PAIR <= group ? PAIR : 1;
            fetch_part(next, cache, head, heads);
            if (pair == PAIR)
                score_block(query + head * size, PAIR, keys + head / group * size, count, cache.width, size,
                            scores + head * stride + start, stride);
            else
                score_block(query + head * size, 1, keys + head / group * size, count, cache.width, size,
                            scores + head * stride + start, stride);
        }
    }
    for (long head = 0; head < heads; head++)
        softmax(scores + head * stride, span.count);
    memset(out, 0, heads * size * sizeof(float));
    for (long block = 0; block <= last; block++) {
        const float *values = block_of(cache.values, cache, span, block) + span.first_head * size;
        const float *next = block < last ? block_of(cache.values, cache, span, block + 1) : span.then;
        long start = block * cache.block_size, count = block < last ? cache.block_size : span.count - start;
        for (long head = 0, pair; head < heads; head += pair) {
            pair = head % group + PAIR <= group ? PAIR : 1;
            fetch_part(next, cache, head, heads);
            if (pair == PAIR)
                add_block(scores + head * stride + start, stride, PAIR, values + head / group * size, count,
                          cache.width, size, out + head * size);
            else
                add_block(scores + head * stride + start, stride, 1, values + head / group * size, count,
                          cache.width, size, out + head * size);
        }
    }
}

void attend_token(struct cache cache, struct span span, long group, long size, const float *query, float *scores,
                  float *out)
{
    switch (size) {
    case 32: attend_sized(cache, span, group, 32, query, scores, out); break;
    case 64: attend_sized(cache, span, group, 64, query, scores, out); break;
    case 128: attend_sized(cache, span, group, 128, query, scores, out); break;
    default: attend_sized(cache, span, group, size, query, scores, out);
    }
}
