/* What layers do between matrix products. Inputs have rows that are `stride` numbers apart, dense in themselves;
   results are dense. Large inputs are spread over `threads`. */

#include "exp.h"
#include "kernels.h"

#define SPREAD_FROM 65536

static inline float norm_scale(const float *x, long size, float eps)
{
    float sum = 0;
    for (long i = 0; i < size; i++)
        sum += x[i] * x[i];
    return 1 / sqrtf(sum / size + eps);
}

void rms_norm(const float *x, long stride, long rows, long size, const float *weight, float eps, float *restrict out,
              int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > SPREAD_FROM)
    for (long row = 0; row < rows; row++) {
        const float *from = x + row * stride;
        float *restrict to = out + row * size;
        float scale = norm_scale(from, size, eps);
        for (long i = 0; i < size; i++)
            to[i] = from[i] * scale * weight[i];
    }
}

/* `sum` becomes x + delta, `out` its norm; all are dense. */
void add_rms_norm(const float *x, const float *delta, long rows, long size, const float *weight, float eps,
                  float *restrict sum, float *restrict out, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > SPREAD_FROM)
    for (long row = 0; row < rows; row++) {
        float *restrict to = sum + row * size;
        for (long i = 0; i < size; i++)
            to[i] = x[row * size + i] + delta[row * size + i];
        float scale = norm_scale(to, size, eps);
        for (long i = 0; i < size; i++)
            out[row * size + i] = to[i] * scale * weight[i];
    }
}

void norm_rope_heads(const float *x, long heads, long size, const float *weight, float eps, const float *cos,
                     const float *sin, float *restrict out)
{
    long half = size / 2;
    for (long head = 0; head < heads; head++) {
        const float *from = x + head * size;
        float *restrict to = out + head * size;
        float scale = weight ? norm_scale(from, size, eps) : 1;
        for (long i = 0; i < half; i++) {
            float low = from[i] * scale, high = from[i + half] * scale;
            if (weight) {
                low *= weight[i];
                high *= weight[i + half];
            }
            to[i] = low * cos[i] + high * sin[i];
            to[i + half] = high * cos[i + half] + low * sin[i + half];
        }
    }
}

/* Queries and keys of `rows` tokens at their positions. `cos` and `sin` have `size` numbers per row; `sin` carries
   the sign of the rotation. */
void qk_norm_rope(const float *q, long q_stride, const float *k, long k_stride, long rows, long heads, long kv_heads,
                  long size, const float *q_weight, const float *k_weight, float eps, const float *cos,
                  const float *sin, float *q_out, float *k_out, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * heads * size > SPREAD_FROM)
    for (long row = 0; row < rows; row++) {
        const float *c = cos + row * size, *s = sin + row * size;
        norm_rope_heads(q + row * q_stride, heads, size, q_weight, eps, c, s, q_out + row * heads * size);
        norm_rope_heads(k + row * k_stride, kv_heads, size, k_weight, eps, c, s, k_out + row * kv_heads * size);
    }
}

void gated_silu(const float *gate, long gate_stride, const float *up, long up_stride, long rows, long size,
                float *restrict out, int threads)
{
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size > SPREAD_FROM)
    for (long row = 0; row < rows; row++) {
        const float *g = gate + row * gate_stride, *u = up + row * up_stride;
        float *restrict to = out + row * size;
        for (long i = 0; i < size; i++)
            to[i] = g[i] * u[i] / (1 + exp_float(-g[i]));
    }
}
