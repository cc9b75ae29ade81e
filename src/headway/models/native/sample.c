/* One token from each row of logits. */

#include "exp.h"

/* Row r draws where the cumulative probability first exceeds `noise[r]`, or, where noise is negative, the first of
   the most likely tokens; `logprobs[r]` is the token's, NaN where logits are not finite. Tokens of probability 0
   are never drawn. `weights` is room for one row. */
void draw(const float *logits, long rows, long vocab, const float *noise, int64_t *tokens, float *logprobs,
          float *restrict weights)
{
    for (long r = 0; r < rows; r++) {
        const float *row = logits + r * vocab;
        float highest = highest_of(row, vocab);
        double total = 0;
        for (long i = 0; i < vocab; i++) {
            weights[i] = exp_float(row[i] - highest);
            total += weights[i];
        }
        long token = 0;
        if (noise[r] < 0) {
            while (token < vocab - 1 && row[token] < highest)
                token++;
        } else {
            double target = noise[r] * total, sum = 0;
            for (long i = 0; i < vocab && sum <= target; i++) {
                token = weights[i] > 0 ? i : token;
                sum += weights[i];
            }
        }
        tokens[r] = token;
        logprobs[r] = (float)(row[token] - highest - log(total));
    }
}
