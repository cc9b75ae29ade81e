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
/* Numbers of a block up to which each line that is read asks for that of the next block, into the first cache, which
   holds both. With AVX-512 a block takes so little time that many lines at once would have to be waited for. */
#define NEAR (LANES == LINE ? 1L << 12 : 0)

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

#if defined(__AVX512F__)
/* A vector of scores at a time, half of them for each of two queries. Where there are fewer places than that, the last
   one is scored again and not kept. */
INLINED void score_vectors(const float *query, int heads, const float *keys, long count, long width, long size,
                           float scale, float *restrict scores, long stride, long ahead)
{
    const int places = LANES / heads;
    for (long first = 0; first < count; first += places) {
        long kept = count - first < places ? count - first : places;
        vector sums[LANES] = {{0}};
        for (int p = 0; p < places; p++) {
            const float *key = keys + (first + (p < kept ? p : kept - 1)) * width;
            for (long i = 0; i < size; i += LANES) {
                __builtin_prefetch(key + i + ahead);
                for (int h = 0; h < heads; h++)
                    sums[h * places + p] += load(key + i) * load(query + h * size + i);
            }
        }
        vector scored = whole_sums(sums) * scale;
        for (int h = 0; h < heads; h++)
            _mm512_mask_storeu_ps(scores + h * stride + first - h * places, (__mmask16)((1 << kept) - 1) << h * places,
                                  (__m512)scored);
    }
}
#endif

/* The scores of a block. The next block is `ahead` numbers from here; 0 where it is not asked for here. */
INLINED void score_block(const float *query, int heads, const float *keys, long count, long width, long size,
                         float *restrict scores, long stride, long ahead)
{
    float scale = 1 / sqrtf((float)size);
#if defined(__AVX512F__)
    if (size % LANES == 0) {
        score_vectors(query, heads, keys, count, width, size, scale, scores, stride, ahead);
        return;
    }
#endif
    long p = 0;
    for (; p + PLACES <= count; p += PLACES)
        score(query, heads, keys + p * width, PLACES, width, size, scale, scores + p, stride);
    for (; p + PLACES / 2 <= count; p += PLACES / 2)
        score(query, heads, keys + p * width, PLACES / 2, width, size, scale, scores + p, stride);
    for (; p < count; p++)
        score(query, heads, keys + p * width, 1, width, size, scale, scores + p, stride);
}

/* Adds a slice of the values of `count` neighbouring places, each times its weight, to that of each head. Where a slice
   is few vectors, those of every other place have sums of their own, so that fewer additions wait for each other. */
INLINED void add_slice(const float *weights, long stride, int heads, const float *values, long count, long width,
                       long size, float *mixed, long ahead)
{
    vector sums[PAIR][SLICE / LANES];
#if defined(__AVX512F__)
    vector others[PAIR][SLICE / LANES] = {{{0}}};
#endif
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < SLICE / LANES; v++)
            sums[h][v] = load(mixed + h * size + v * LANES);
    long p = 0;
#if defined(__AVX512F__)
    for (; p + 1 < count; p += 2)
        for (int v = 0; v < SLICE / LANES; v++) {
            const float *even = values + p * width + v * LANES, *odd = even + width;
            __builtin_prefetch(even + ahead);
            __builtin_prefetch(odd + ahead);
            for (int h = 0; h < heads; h++) {
                sums[h][v] += load(even) * weights[h * stride + p];
                others[h][v] += load(odd) * weights[h * stride + p + 1];
            }
        }
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < SLICE / LANES; v++)
            sums[h][v] += others[h][v];
#endif
    for (; p < count; p++)
        for (int h = 0; h < heads; h++)
            for (int v = 0; v < SLICE / LANES; v++)
                sums[h][v] += load(values + p * width + v * LANES) * weights[h * stride + p];
    for (int h = 0; h < heads; h++)
        for (int v = 0; v < SLICE / LANES; v++)
            store(mixed + h * size + v * LANES, sums[h][v]);
}

INLINED void add_block(const float *weights, long stride, int heads, const float *values, long count, long width,
                       long size, float *restrict mixed, long ahead)
{
    long i = 0;
    for (; i + SLICE <= size; i += SLICE)
        add_slice(weights, stride, heads, values + i, count, width, size, mixed + i, ahead);
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
    int near = size % LANES == 0 && cache.block_size * cache.width <= NEAR;
    query += first * size, out += first * size;
    for (long block = 0; block <= last; block++) {
        const float *keys = block_of(cache.keys, cache, span, block) + span.first_head * size;
        const float *next = block < last ? block_of(cache.keys, cache, span, block + 1)
                                         : block_of(cache.values, cache, span, 0);
        long start = block * cache.block_size, count = block < last ? cache.block_size : span.count - start;
        long ahead = near ? next + span.first_head * size - keys : 0;
        for (long head = 0, pair; head < heads; head += pair) {
            pair = head % group + PAIR <= group ? PAIR : 1;
            if (!near)
                fetch_part(next, cache, head, heads);
            if (pair == PAIR)
                score_block(query + head * size, PAIR, keys + head / group * size, count, cache.width, size,
                            scores + head * stride + start, stride, ahead);
            else
                score_block(query + head * size, 1, keys + head / group * size, count, cache.width, size,
                            scores + head * stride + start, stride, ahead);
        }
    }
    for (long head = 0; head < heads; head++)
        softmax(scores + head * stride, span.count);
    memset(out, 0, heads * size * sizeof(float));
    for (long block = 0; block <= last; block++) {
        const float *values = block_of(cache.values, cache, span, block) + span.first_head * size;
        const float *next = block < last ? block_of(cache.values, cache, span, block + 1) : span.then;
        long start = block * cache.block_size, count = block < last ? cache.block_size : span.count - start;
        long ahead = near ? next + span.first_head * size - values : 0;
        for (long head = 0, pair; head < heads; head += pair) {
            pair = head % group + PAIR <= group ? PAIR : 1;
            if (!near)
                fetch_part(next, cache, head, heads);
            if (pair == PAIR)
                add_block(scores + head * stride + start, stride, PAIR, values + head / group * size, count,
                          cache.width, size, out + head * size, ahead);
            else
                add_block(scores + head * stride + start, stride, 1, values + head / group * size, count,
                          cache.width, size, out + head * size, ahead);
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
