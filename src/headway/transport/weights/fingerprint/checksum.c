/* Copies and counts bytes in one pass: the checksum of reference.py, at the speed of memory. */

#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define WORD 8
#define LINE 64
#define ROW 4096 /* bytes */
#define AHEAD 1024
#define STREAMED (1 << 20) /* from here on a copy bypasses the caches where the processor can be told to */

typedef struct {
    uint64_t plain, keyed;
} Sums;

static inline void add_word(Sums *sums, uint64_t word, const uint32_t *key)
{
    sums->plain += word;
    sums->keyed += (word & 0xffffffff) * key[0] + (word >> 32) * key[1];
}

/* Whole lines. `to` is NULL where nothing is copied; both that and `streamed` are constants where this is inlined. */
static inline __attribute__((always_inline)) Sums count_lines(const uint8_t *restrict from, uint8_t *restrict to,
                                                              long lines, const uint32_t *restrict key, int streamed)
{
    Sums sums = {0, 0};
#if defined(__aarch64__)
    uint64x2_t plain[2] = {vdupq_n_u64(0), vdupq_n_u64(0)}, low = vdupq_n_u64(0), high = vdupq_n_u64(0);
    for (long line = 0; line < lines; line++, from += LINE, key += LINE / 4) {
        uint8x16_t part[4] = {vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)};
        __builtin_prefetch(from + AHEAD);
        if (to) /* as one block: compilers spread the stores, which costs a tenth of the speed */
            __asm__ volatile("stp %q0, %q1, [%4]\n\tstp %q2, %q3, [%4, #32]"
                             :
                             : "w"(part[0]), "w"(part[1]), "w"(part[2]), "w"(part[3]), "r"(to)
                             : "memory");
        to = to ? to + LINE : NULL;
        for (int i = 0; i < 4; i++) {
            uint32x4_t halves = vreinterpretq_u32_u8(part[i]), keys = vld1q_u32(key + 4 * i);
            plain[i % 2] = vaddq_u64(plain[i % 2], vreinterpretq_u64_u8(part[i]));
            low = vmlal_u32(low, vget_low_u32(halves), vget_low_u32(keys));
            high = vmlal_high_u32(high, halves, keys);
        }
    }
    sums.plain = vaddvq_u64(vaddq_u64(plain[0], plain[1]));
    sums.keyed = vaddvq_u64(vaddq_u64(low, high));
#elif defined(__SSE2__)
    __m128i plain = _mm_setzero_si128(), low = plain, high = plain;
    for (long line = 0; line < lines; line++, from += LINE, key += LINE / 4) {
        _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);
        for (int i = 0; i < 4; i++) {
            __m128i part = _mm_loadu_si128((const __m128i *)from + i);
            __m128i keys = _mm_loadu_si128((const __m128i *)key + i);
            if (to && streamed)
                _mm_stream_si128((__m128i *)to + i, part);
            else if (to)
                _mm_storeu_si128((__m128i *)to + i, part);
            plain = _mm_add_epi64(plain, part);
            low = _mm_add_epi64(low, _mm_mul_epu32(part, keys));
            high = _mm_add_epi64(high, _mm_mul_epu32(_mm_srli_epi64(part, 32), _mm_srli_epi64(keys, 32)));
        }
        to = to ? to + LINE : NULL;
    }
    uint64_t lanes[2];
    _mm_storeu_si128((__m128i *)lanes, plain);
    sums.plain = lanes[0] + lanes[1];
    _mm_storeu_si128((__m128i *)lanes, _mm_add_epi64(low, high));
    sums.keyed = lanes[0] + lanes[1];
#else
    for (long word = 0; word < lines * (LINE / WORD); word++) {
        uint64_t value;
        memcpy(&value, from + word * WORD, WORD);
        if (to)
            memcpy(to + word * WORD, &value, WORD);
        add_word(&sums, value, key + 2 * word);
    }
#endif
    (void)streamed;
    return sums;
}

static uint64_t mix(uint64_t sum, uint64_t row)
{
    uint64_t x = sum + (row + 1) * 0x9E3779B97F4A7C15;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

/* Complete rows, the first of which is number `row`: mixed, and summed. Nothing but the copy is written meanwhile,
   since a processor that sees lines written one after the other spares itself reading them first. */
static inline __attribute__((always_inline)) Sums count_rows(const uint8_t *from, uint8_t *to, long rows, uint64_t row,
                                                             const uint32_t *keys, int streamed)
{
    Sums totals = {0, 0};
    for (long i = 0; i < rows; i++) {
        Sums sums = count_lines(from + i * ROW, to ? to + i * ROW : NULL, ROW / LINE, keys, streamed);
        totals.plain += mix(sums.plain, row + i);
        totals.keyed += mix(sums.keyed, row + i);
    }
    return totals;
}

static __attribute__((noinline)) Sums count_only(const uint8_t *from, long rows, uint64_t row, const uint32_t *keys)
{
    return count_rows(from, NULL, rows, row, keys, 0);
}

static __attribute__((noinline)) Sums count_and_copy(const uint8_t *from, uint8_t *to, long rows, uint64_t row,
                                                     const uint32_t *keys)
{
    return count_rows(from, to, rows, row, keys, 0);
}

static __attribute__((noinline)) Sums count_and_stream(const uint8_t *from, uint8_t *to, long rows, uint64_t row,
                                                       const uint32_t *keys)
{
    Sums totals = count_rows(from, to, rows, row, keys, 1);
#if defined(__SSE2__)
    _mm_sfence();
#endif
    return totals;
}

/* Part of a row: `size` bytes that begin `begin` bytes into it. Words at the ends may be there in part. */
static Sums count_partial(const uint8_t *from, uint8_t *to, long begin, long size, const uint32_t *keys)
{
    Sums sums = {0, 0};
    for (long done = 0; done < size;) {
        long lead = (begin + done) % WORD;
        long part = WORD - lead < size - done ? WORD - lead : size - done;
        uint64_t word = 0;
        memcpy((uint8_t *)&word + lead, from + done, part);
        add_word(&sums, word, keys + (begin + done) / WORD * 2);
        done += part;
    }
    if (to)
        memcpy(to, from, size);
    return sums;
}

/* `size` bytes that begin `offset` bytes into the whole tensor. `out` is the sums of the complete rows, mixed, of
   the first row where it is not complete, and of the last one where that is another and not complete. */
void count(const uint8_t *from, uint8_t *to, int64_t size, uint64_t offset, const uint32_t *keys, Sums *out)
{
    long begin = offset % ROW;
    long head = begin ? ROW - begin : 0;
    head = head < size ? head : size;
    long rows = (size - head) / ROW, tail = (size - head) % ROW;
    uint64_t row = (offset + head) / ROW;
    const uint8_t *body = from + head;
    uint8_t *place = to ? to + head : NULL;
    memset(out, 0, 3 * sizeof(Sums));
    if (head)
        out[1] = count_partial(from, to, begin, head, keys);
    if (!to)
        out[0] = count_only(body, rows, row, keys);
    else if (size >= STREAMED && (uintptr_t)place % 16 == 0)
        out[0] = count_and_stream(body, place, rows, row, keys);
    else
        out[0] = count_and_copy(body, place, rows, row, keys);
    if (tail)
        out[2] = count_partial(body + rows * ROW, place ? place + rows * ROW : NULL, 0, tail, keys);
}
