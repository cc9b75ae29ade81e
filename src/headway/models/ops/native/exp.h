/* exp in float32, written so that a compiler turns a loop over it into vector code. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "vector.h"

#define LOG2_E 1.44269504f
#define LN_2 0.693147182f

/* The larger and the smaller of two numbers; one that is NaN loses, at least as `a`. On x86_64 fmaxf and fminf are
   calls, since its instructions treat NaN otherwise, and a loop with a call is not vector code. */
#if defined(__x86_64__)
static inline float larger(float a, float b)
{
    return a > b ? a : b;
}

static inline float smaller(float a, float b)
{
    return a < b ? a : b;
}
#else
#define larger fmaxf
#define smaller fminf
#endif

/* Within two units in the last place near 0, within five between -87 and 88, and 0 below. Takes NaN for something
   small: callers look for it themselves, which is cheaper. */
static inline float exp_float(float x)
{
    float clamped = smaller(larger(x, -88.0f), 88.0f);
    float power = rintf(clamped * LOG2_E);
    float rest = clamped - power * LN_2;
    /* The best polynomial of its degree between -ln(2) / 2 and ln(2) / 2, in pairs that can be computed at once. */
    float square = rest * rest;
    float series = 0.001381454f * square + (0.00836874512f * rest + 0.0416683908f);
    series = series * square + (0.166665204f * rest + 0.499999934f);
    series = series * square + (rest + 1);
    /* 2^power; 0 where power is -127. */
    int32_t bits = ((int32_t)power + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return series * scale;
}

/* The highest of `count` numbers; NaN where it is not finite or one of them is NaN. */
static inline float highest_of(const float *x, long count)
{
    float highest = x[0];
    int unordered = 0;
    long i = 0;
#if defined(__x86_64__)
    /* Compilers do not make this of the loop below. The last vector may have numbers of the one before it. */
    if (count >= LANES) {
        vector high = load(x);
        lanes unlike = {0};
        for (; i < count; i += LANES) {
            vector next = load(x + (i + LANES <= count ? i : count - LANES));
            lanes above = next > high;
            high = (vector)(((lanes)next & above) | ((lanes)high & ~above));
            unlike |= next != next;
        }
        for (int lane = 0; lane < LANES; lane++) {
            highest = larger(highest, high[lane]);
            unordered |= unlike[lane];
        }
    }
#endif
    for (; i < count; i++) {
        highest = larger(highest, x[i]);
        unordered |= x[i] != x[i];
    }
    return unordered || !isfinite(highest) ? NAN : highest;
}
