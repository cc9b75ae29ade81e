/* What the kernels offer each other; a pass over the whole model is made of them. */

#pragma once

#include <stdint.h>

/* Calls stay in this library, whatever others in the process have under these names. */
#pragma GCC visibility push(protected)

/* out (rows, outputs) = x (rows, inputs; `stride` apart) times the transpose of w (outputs, inputs); where `add` is
   set, that is added to what `out` holds. */
void multiply(const float *x, long stride, long rows, const float *w, long outputs, long inputs, float *out, int add);

void rms_norm(const float *x, long stride, long rows, long size, const float *weight, float eps, float *restrict out,
              int threads);

/* One token's heads, normed by `weight` where there is one, then rotated. */
void norm_rope_heads(const float *x, long heads, long size, const float *weight, float eps, const float *cos,
                     const float *sin, float *restrict out);

/* silu(gate) * up over rows of `size`. */
void gated_silu(const float *gate, long gate_stride, const float *up, long up_stride, long rows, long size,
                float *restrict out, int threads);

/* One layer's keys and values, in slots of `width` numbers; slot = block * block_size + offset. */
struct cache {
    const float *keys, *values;
    long block_size, width;
};

/* What one token attends over: `count` places in `blocks`, of kv heads `first_head` to `last_head`. `then` is a block
   that is read after it. */
struct span {
    const int64_t *blocks;
    long count, first_head, last_head;
    const float *then;
};

/* The query heads of a token's span, `group` of them to each kv head, of `size` numbers. `scores` is scratch for the
   span's query heads times its places. */
void attend_token(struct cache cache, struct span span, long group, long size, const float *query, float *scores,
                  float *out);

/* The token where the cumulative probability first exceeds `noise`, or, where noise is negative, the first of the most
   likely ones, and its logprob, which is NaN where logits are not finite. Tokens of probability 0 are never drawn.
   `weights` is scratch for a row. */
long draw_row(const float *logits, long vocab, float noise, float *logprob, float *restrict weights);

#pragma GCC visibility pop
