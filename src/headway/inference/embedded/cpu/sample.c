/* One token for each sequence of a step, with what it samples with. */

#include "../../../models/ops/native/kernels.h"

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

/* Row r of logits belongs to row `which[r]` of what sequences sample with; its token will stand at `positions[r]`.
   `scratch` is for two rows. */
void sample(const float *logits, long rows, long vocab, const struct sampling *sampling, const int64_t *which,
            const int64_t *positions, int64_t *tokens, float *logprobs, float *scratch)
{
    for (long r = 0; r < rows; r++) {
        const float *row = logits + r * vocab;
        float temperature = sampling->temperatures[which[r]], *scaled = scratch + vocab;
        if (temperature != 1) {
            for (long i = 0; i < vocab; i++)
                scaled[i] = row[i] / temperature;
            row = scaled;
        }
        float noise = sampling->greedy[which[r]] ? -1 : uniform(sampling->seeds[which[r]], positions[r]);
        tokens[r] = draw_row(row, vocab, noise, logprobs + r, scratch);
    }
}
