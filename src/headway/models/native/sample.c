/* One token from each row of logits. */

#include "exp.h"

/* What sequences sample with, by their rows. */
struct sampling {
    const uint64_t *seeds;
    const float *temperatures;
    const uint8_t *greedy;
};

static uint64_t mixed(uint64_t x)
{
    x += 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

/* A number in [0, 1), of 23 bits, for a seed and a position: two rounds of the splitmix64 finalizer. */
static float uniform(uint64_t seed, int64_t position)
{
    return (float)(mixed(mixed(seed) + (uint64_t)position * 0x9E3779B97F4A7C15) >> 41) / (1 << 23);
}

/* The token where the cumulative probability first exceeds `noise`, or, where noise is negative, the first of the most
   likely ones, and its logprob, which is NaN where logits are not finite. Tokens of probability 0 are never drawn.
   `weights` is room for a row. */
static long draw_row(const float *logits, long vocab, float noise, float *logprob, float *restrict weights)
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

/* Row r of logits belongs to row `which[r]` of what sequences sample with; its token will stand at `positions[r]`.
   `room` is for two rows. */
void sample(const float *logits, long rows, long vocab, const struct sampling *sampling, const int64_t *which,
            const int64_t *positions, int64_t *tokens, float *logprobs, float *room)
{
    for (long r = 0; r < rows; r++) {
        const float *row = logits + r * vocab;
        float temperature = sampling->temperatures[which[r]], *scaled = room + vocab;
        if (temperature != 1) {
            for (long i = 0; i < vocab; i++)
                scaled[i] = row[i] / temperature;
            row = scaled;
        }
        float noise = sampling->greedy[which[r]] ? -1 : uniform(sampling->seeds[which[r]], positions[r]);
        tokens[r] = draw_row(row, vocab, noise, logprobs + r, room);
    }
}
