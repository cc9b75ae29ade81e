/* Vectors of as many numbers as a register of this processor holds. */

#pragma once

#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vector __attribute__((vector_size(LANES * sizeof(float))));
/* What comparing vectors gives. */
typedef int lanes __attribute__((vector_size(LANES * sizeof(int))));

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

#if defined(__AVX512F__)
/* Number 4q + v of the result is the sum of quarter q of vector v: three additions make 16 sums. */
static inline __attribute__((always_inline)) vector quarter_sums(const vector *of)
{
    __m512 a = (__m512)of[0], b = (__m512)of[1], c = (__m512)of[2], d = (__m512)of[3];
    __m512d ab = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512d cd = (__m512d)_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return (vector)_mm512_add_ps((__m512)_mm512_unpacklo_pd(ab, cd), (__m512)_mm512_unpackhi_pd(ab, cd));
}

/* The sum of all numbers of each of 16 vectors. */
static inline __attribute__((always_inline)) vector whole_sums(const vector *of)
{
    __m512 a = (__m512)quarter_sums(of), b = (__m512)quarter_sums(of + 4);
    __m512 c = (__m512)quarter_sums(of + 8), d = (__m512)quarter_sums(of + 12);
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    return (vector)_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}
#endif
