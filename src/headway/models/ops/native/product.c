/* Matrix products with weights as they lie in a checkpoint: nothing is packed, so nothing has to be renewed when they
   change. The number of sums that stay in registers is what a processor has room for. */

#include "kernels.h"

#define TILE_ROWS 4
#if defined(__AVX2__)
#define TILE_COLUMNS 3
#else
#define TILE_COLUMNS 4
#endif
/* Numbers of `x` that are used again and again while they are in the first cache, and of `w` in the second. */
#define NEAR (1L << 13)
#define FAR (1L << 16)
#define SPREAD_FROM (1L << 21)

static long least(long a, long b)
{
    return a < b ? a : b;
}

/* Processors with AVX-512 have a `multiply` of their own, in panels.c. */
#if !defined(__AVX512F__)

/* A tile of results: each number that is loaded is used for a whole row or column of them. `rows` and `columns` are
   constants wherever this is inlined. A result is the same sum in the same order in a tile of any size, so that it
   does not depend on what else is in a batch. */
static inline __attribute__((always_inline)) void tile(const float *restrict x, long stride, int rows,
                                                       const float *restrict w, int columns, long inputs,
                                                       float *restrict out, long outputs, int add)
{
    float sums[TILE_ROWS][TILE_COLUMNS] = {{0}};
    for (long i = 0; i < inputs; i++)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns; c++)
                sums[r][c] += x[r * stride + i] * w[c * inputs + i];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            out[r * outputs + c] = add ? out[r * outputs + c] + sums[r][c] : sums[r][c];
}

/* What is left over at the edges. */
static void edge(const float *x, long stride, long rows, const float *w, long columns, long inputs, float *out,
                 long outputs, int add)
{
    for (long r = 0; r < rows; r++) {
        const float *from = x + r * stride;
        float *to = out + r * outputs;
        if (columns == TILE_COLUMNS)
            tile(from, stride, 1, w, TILE_COLUMNS, inputs, to, outputs, add);
        else
            for (long c = 0; c < columns; c++)
                tile(from, stride, 1, w + c * inputs, 1, inputs, to + c, outputs, add);
    }
}

/* As many whole tiles of `step` rows of `inputs` numbers as `space` numbers hold, and at least one. */
static long whole_tiles(long space, long inputs, long step)
{
    long count = space / inputs / step * step;
    return count < step ? step : count;
}

void multiply(const float *x, long stride, long rows, const float *w, long outputs, long inputs, float *out, int add)
{
    long kept = whole_tiles(NEAR, inputs, TILE_ROWS), wide = whole_tiles(FAR, inputs, TILE_COLUMNS);
    for (long left = 0; left < outputs; left += wide) {
        long right = least(left + wide, outputs);
        for (long top = 0; top < rows; top += kept) {
            long bottom = least(top + kept, rows);
            for (long c = left; c < right; c += TILE_COLUMNS) {
                for (long r = top; r < bottom; r += TILE_ROWS) {
                    long height = least(bottom - r, TILE_ROWS), width = least(right - c, TILE_COLUMNS);
                    const float *from = x + r * stride, *by = w + c * inputs;
                    float *to = out + r * outputs + c;
                    if (height == TILE_ROWS && width == TILE_COLUMNS)
                        tile(from, stride, TILE_ROWS, by, TILE_COLUMNS, inputs, to, outputs, add);
                    else
                        edge(from, stride, height, by, width, inputs, to, outputs, add);
                }
            }
        }
    }
}

#endif

void product(const float *x, long stride, long rows, const float *w, long outputs, long inputs, float *out,
             int threads)
{
    long shares = threads > 1 && rows * outputs * inputs > SPREAD_FROM ? threads : 1;
    long share = (rows / shares / TILE_ROWS + 1) * TILE_ROWS;
#pragma omp parallel for num_threads(threads) if (shares > 1)
    for (long top = 0; top < rows; top += share)
        multiply(x + top * stride, stride, least(share, rows - top), w, outputs, inputs, out + top * outputs, 0);
}
