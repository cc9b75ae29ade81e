/* Matrix products of narrow models, whose matrices are too small for what a BLAS library does to prepare them. */

#define TILE 4
#define SPREAD_FROM (1L << 21)
/* Numbers of `x` that are used again and again while they are in the first cache. */
#define KEPT 8192

/* A tile of 4 x 4 results: 16 sums that stay in registers, each number that is loaded used four times. */
static void full_tile(const float *restrict x, long stride, const float *restrict w, long inputs, float *restrict out,
                      long outputs)
{
    const float *x0 = x, *x1 = x + stride, *x2 = x + 2 * stride, *x3 = x + 3 * stride;
    const float *w0 = w, *w1 = w + inputs, *w2 = w + 2 * inputs, *w3 = w + 3 * inputs;
    float s00 = 0, s01 = 0, s02 = 0, s03 = 0, s10 = 0, s11 = 0, s12 = 0, s13 = 0;
    float s20 = 0, s21 = 0, s22 = 0, s23 = 0, s30 = 0, s31 = 0, s32 = 0, s33 = 0;
    for (long i = 0; i < inputs; i++) {
        s00 += x0[i] * w0[i], s01 += x0[i] * w1[i], s02 += x0[i] * w2[i], s03 += x0[i] * w3[i];
        s10 += x1[i] * w0[i], s11 += x1[i] * w1[i], s12 += x1[i] * w2[i], s13 += x1[i] * w3[i];
        s20 += x2[i] * w0[i], s21 += x2[i] * w1[i], s22 += x2[i] * w2[i], s23 += x2[i] * w3[i];
        s30 += x3[i] * w0[i], s31 += x3[i] * w1[i], s32 += x3[i] * w2[i], s33 += x3[i] * w3[i];
    }
    out[0] = s00, out[1] = s01, out[2] = s02, out[3] = s03, out += outputs;
    out[0] = s10, out[1] = s11, out[2] = s12, out[3] = s13, out += outputs;
    out[0] = s20, out[1] = s21, out[2] = s22, out[3] = s23, out += outputs;
    out[0] = s30, out[1] = s31, out[2] = s32, out[3] = s33;
}

/* What is left over at the edges. */
static void edge_tile(const float *x, long stride, long rows, const float *w, long columns, long inputs, float *out,
                      long outputs)
{
    for (long r = 0; r < rows; r++) {
        for (long c = 0; c < columns; c++) {
            float sum = 0;
            for (long i = 0; i < inputs; i++)
                sum += x[r * stride + i] * w[c * inputs + i];
            out[r * outputs + c] = sum;
        }
    }
}

static long least(long a, long b)
{
    return a < b ? a : b;
}

/* out (rows, outputs) = x (rows, inputs; `stride` apart) times the transpose of w (outputs, inputs). */
void product(const float *x, long stride, long rows, const float *w, long outputs, long inputs, float *out,
             int threads)
{
    long kept = KEPT / inputs / TILE * TILE;
    kept = kept < TILE ? TILE : kept;
    for (long top = 0; top < rows; top += kept) {
        long bottom = least(top + kept, rows);
#pragma omp parallel for num_threads(threads) if (threads > 1 && (bottom - top) * outputs * inputs > SPREAD_FROM)
        for (long c = 0; c < outputs; c += TILE) {
            long columns = least(outputs - c, TILE);
            for (long r = top; r < bottom; r += TILE) {
                long count = least(bottom - r, TILE);
                const float *from = x + r * stride, *by = w + c * inputs;
                float *to = out + r * outputs + c;
                if (count == TILE && columns == TILE)
                    full_tile(from, stride, by, inputs, to, outputs);
                else
                    edge_tile(from, stride, count, by, columns, inputs, to, outputs);
            }
        }
    }
}
