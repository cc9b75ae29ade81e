/* Matrix products with AVX-512, of weights as they lie in a checkpoint. Were a register 16 inputs of one output, adding
   up its lanes would take a third of the time where there are 128 inputs. Here it is four inputs of each of four
   outputs. A panel of outputs is laid out so once, in the first cache, for all rows; few rows have that done in
   registers. A result is the same sum in the same order either way, so that it does not depend on what else is in a
   batch. */

#include "kernels.h"
#include "vector.h"

#if defined(__AVX512F__)

#define INLINED static inline __attribute__((always_inline))

/* Inputs of each output in a register, and outputs of which it has inputs. */
#define QUAD 4
#define SIDE 4
/* Vector v has columns v, v + 4, v + 8 and v + 12 of a panel, so that `quarter_sums` has all in their order. */
#define VECTORS 4
#define COLUMNS (SIDE * VECTORS)
#define ROWS 4
/* Inputs of a panel, which takes 16 KB of the first cache. */
#define DEPTH 256

/* Four numbers, four times. */
INLINED vector spread(const float *from)
{
    return (vector)_mm512_broadcast_f32x4(_mm_loadu_ps(from));
}

/* 16 inputs of four columns, `apart` from each other, become four vectors of four inputs of each. */
INLINED void gather(const float *w, long apart, vector quads[SIDE])
{
    __m512 a = (__m512)load(w), b = (__m512)load(w + apart);
    __m512 c = (__m512)load(w + 2 * apart), d = (__m512)load(w + 3 * apart);
    __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44), cd = _mm512_shuffle_f32x4(c, d, 0x44);
    quads[0] = (vector)_mm512_shuffle_f32x4(ab, cd, 0x88);
    quads[1] = (vector)_mm512_shuffle_f32x4(ab, cd, 0xdd);
    ab = _mm512_shuffle_f32x4(a, b, 0xee), cd = _mm512_shuffle_f32x4(c, d, 0xee);
    quads[2] = (vector)_mm512_shuffle_f32x4(ab, cd, 0x88);
    quads[3] = (vector)_mm512_shuffle_f32x4(ab, cd, 0xdd);
}

/* A panel of `columns` by `inputs`; what it has no weights for is 0. */
static void pack(const float *w, long apart, long columns, long inputs, float *restrict panel)
{
    long whole = columns == COLUMNS ? inputs / LANES * LANES : 0;
    for (long i = 0; i < whole; i += LANES)
        for (int v = 0; v < VECTORS; v++) {
            vector quads[SIDE];
            gather(w + v * apart + i, VECTORS * apart, quads);
            for (int q = 0; q < SIDE; q++)
                store(panel + (i + q * QUAD) * COLUMNS + v * LANES, quads[q]);
        }
    for (long i = whole; i < inputs; i += QUAD) {
        long count = inputs - i < QUAD ? inputs - i : QUAD;
        float *to = panel + i * COLUMNS;
        memset(to, 0, QUAD * COLUMNS * sizeof(float));
        for (long c = 0; c < columns; c++)
            memcpy(to + c % VECTORS * LANES + c / VECTORS * QUAD, w + c * apart + i, count * sizeof(float));
    }
}

/* An instruction, because the compiler may change the order of sums that are written as such. */
INLINED vector plus_product(vector sum, vector x, vector by)
{
    return (vector)_mm512_fmadd_ps((__m512)x, (__m512)by, (__m512)sum);
}

/* Stores, or adds, the results of `columns` columns. */
INLINED void put(vector sum, float *out, long columns, int add)
{
    __mmask16 mask = 0xffff >> (COLUMNS - columns);
    if (add)
        sum += (vector)_mm512_maskz_loadu_ps(mask, out);
    _mm512_mask_storeu_ps(out, mask, (__m512)sum);
}

/* What four inputs add to the sums of `rows` rows, a constant wherever this and the next are inlined. */
INLINED void step(const float *x, long stride, int rows, const float *panel, vector sums[ROWS][VECTORS])
{
    vector by[VECTORS];
    for (int v = 0; v < VECTORS; v++)
        by[v] = load(panel + v * LANES);
    for (int r = 0; r < rows; r++) {
        vector from = spread(x + r * stride);
        for (int v = 0; v < VECTORS; v++)
            sums[r][v] = plus_product(sums[r][v], from, by[v]);
    }
}

/* The results of a panel for `rows` rows. Meanwhile it asks for the weights of an output at `next`. */
INLINED void tile(const float *x, long stride, int rows, const float *panel, long columns, long inputs,
                  const float *next, float *out, long outputs, int add)
{
    vector sums[ROWS][VECTORS] = {{{0}}};
    long whole = inputs / QUAD * QUAD, i = 0;
    for (; i + LANES <= inputs; i += LANES) {
        __builtin_prefetch(next + i);
        for (long q = i; q < i + LANES; q += QUAD)
            step(x + q, stride, rows, panel + q * COLUMNS, sums);
    }
    for (; i < whole; i += QUAD)
        step(x + i, stride, rows, panel + i * COLUMNS, sums);
    if (whole < inputs) {
        float rest[ROWS][QUAD] = {{0}};
        for (int r = 0; r < rows; r++)
            memcpy(rest[r], x + r * stride + whole, (inputs - whole) * sizeof(float));
        step(rest[0], QUAD, rows, panel + whole * COLUMNS, sums);
    }
    for (int r = 0; r < rows; r++)
        put(quarter_sums(sums[r]), out + r * outputs, columns, add);
}

/* The same sums, from weights as they lie: a whole panel, and whole vectors of inputs. */
INLINED void tile_unpacked(const float *x, long stride, int rows, const float *w, long apart, long inputs, float *out,
                           long outputs, int add)
{
    vector sums[ROWS][VECTORS] = {{{0}}};
    for (long i = 0; i < inputs; i += LANES)
        for (int v = 0; v < VECTORS; v++) {
            vector quads[SIDE];
            gather(w + v * apart + i, VECTORS * apart, quads);
            for (int q = 0; q < SIDE; q++)
                for (int r = 0; r < rows; r++)
                    sums[r][v] = plus_product(sums[r][v], spread(x + r * stride + i + q * QUAD), quads[q]);
        }
    for (int r = 0; r < rows; r++)
        put(quarter_sums(sums[r]), out + r * outputs, COLUMNS, add);
}

/* At most ROWS rows. */
static void few(const float *x, long stride, long rows, const float *w, long apart, long inputs, float *out,
                long outputs, int add)
{
    switch (rows) {
    case 1: tile_unpacked(x, stride, 1, w, apart, inputs, out, outputs, add); break;
    case 2: tile_unpacked(x, stride, 2, w, apart, inputs, out, outputs, add); break;
    case 3: tile_unpacked(x, stride, 3, w, apart, inputs, out, outputs, add); break;
    default: tile_unpacked(x, stride, ROWS, w, apart, inputs, out, outputs, add);
    }
}

/* Any number of rows. The weights of the next panel start at `next`, and each tile asks for those of one output. */
static void many(const float *x, long stride, long rows, const float *panel, long columns, long inputs,
                 const float *next, long apart, float *out, long outputs, int add)
{
    const float *last = next + (COLUMNS - 1) * apart;
    for (; rows >= ROWS; rows -= ROWS, x += ROWS * stride, out += ROWS * outputs) {
        tile(x, stride, ROWS, panel, columns, inputs, next, out, outputs, add);
        next += next < last ? apart : 0;
    }
    switch (rows) {
    case 1: tile(x, stride, 1, panel, columns, inputs, next, out, outputs, add); break;
    case 2: tile(x, stride, 2, panel, columns, inputs, next, out, outputs, add); break;
    case 3: tile(x, stride, 3, panel, columns, inputs, next, out, outputs, add); break;
    }
}

void multiply(const float *x, long stride, long rows, const float *w, long outputs, long inputs, float *out, int add)
{
    float panel[COLUMNS * DEPTH] __attribute__((aligned(LANES * sizeof(float))));
    for (long first = 0; first < inputs; first += DEPTH) {
        long depth = inputs - first < DEPTH ? inputs - first : DEPTH;
        int more = add || first > 0;
        for (long left = 0; left < outputs; left += COLUMNS) {
            long columns = outputs - left < COLUMNS ? outputs - left : COLUMNS;
            const float *from = x + first, *by = w + left * inputs + first;
            if (rows <= ROWS && columns == COLUMNS && depth % LANES == 0) {
                few(from, stride, rows, by, inputs, depth, out + left, outputs, more);
            } else {
                pack(by, inputs, columns, depth, panel);
                many(from, stride, rows, panel, columns, depth, by + COLUMNS * inputs, inputs, out + left, outputs,
                     more);
            }
        }
    }
}

#endif
