/* Vectors of as many numbers as a register of this processor holds. */

#pragma once

#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vector __attribute__((vector_size(LANES * sizeof(float))));

static inline __attribute__((always_inline)) vector load(const float *from)
{
    vector loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

static inline __attribute__((always_inline)) void store(float *to, vector stored)
{
    memcpy(to, &stored, sizeof stored);
}
