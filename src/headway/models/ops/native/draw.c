/* One token from each row of logits. */

#include "exp.h"
#include "kernels.h"

long draw_row(const float *logits, long vocab, float noise, float *logprob, float *restrict weights)
{
    float highest = highest_of(logits, vocab);
    double total = 0;
    for (long i = 0; i < vocab; i++) {
        weights[i] = exp_float(logits[i] - highest);
        total += weights[i];
    }
    long token = 0;
    if (noise < 0) {
        while (token < vocab - 1 && logits[token] < highest)
            token++;
    } else {
        double target = noise * total, sum = 0;
        for (long i = 0; i < vocab && sum <= target; i++) {
            token = weights[i] > 0 ? i : token;
            sum += weights[i];
        }
    }
    *logprob = (float)(logits[token] - highest - log(total));
    return token;
}

void draw(const float *logits, long rows, long vocab, const float *noise, int64_t *tokens, float *logprobs,
          float *restrict weights)
{
    for (long r = 0; r < rows; r++)
        tokens[r] = draw_row(logits + r * vocab, vocab, noise[r], logprobs + r, weights);
}
