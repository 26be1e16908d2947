// Weights that are quantised to 8 or 4 bits: whole numbers, which a scale makes weights of. They are widened on their way
// into the products, exactly, and the sums multiplied by their scales.
#pragma once

#include "simd.h"

// 64 of them in a unit of a panel, two for each output, -127 to 127.
struct Int8 { uint8_t bits; };

// A unit's 32 bytes hold two for each output, -8 to 7: the first one in the lower half.
struct Int4 { uint8_t bits; };

#if defined(__AVX512BF16__)

// Where in a unit an output's weight is: so that unpacking the lower and upper bytes of bf16 numbers puts the first 16
// outputs into the one register, in their order, and the others into the other.
static inline int place(int output, int input) { return output % 16 / 4 * 16 + output / 16 * 8 + output % 4 * 2 + input; }

// A sign and a magnitude.
static inline uint8_t encoded(int8_t weight) { return weight < 0 ? 0x80 | -weight : weight; }

// The lower and upper bytes of N numbers in bf16: 0 and following, those from `negative` on less N.
template <int N> struct Bf16Bytes {
    uint8_t low[N] = {}, high[N] = {};

    constexpr Bf16Bytes(int negative) {
        for (int i = 0; i < N; i++) {
            int magnitude = i < negative ? i : N - i, exponent = 0;
            while (magnitude >> (exponent + 1)) exponent++;
            int bits = magnitude ? (127 + exponent) << 7 | ((magnitude << (7 - exponent)) & 0x7f) : 0;
            low[i] = bits & 0xff, high[i] = bits >> 8 | (i < negative ? 0 : 0x80);
        }
    }
};
alignas(64) constexpr Bf16Bytes<128> MAGNITUDES(128);
alignas(64) constexpr Bf16Bytes<16> NIBBLES(8);

// Pairs of inputs of the first 16 outputs, and of the others.
struct Operands { __m512bh first, second; };

static inline Operands unpacked(__m512i low, __m512i high) {
    return {(__m512bh)_mm512_unpacklo_epi8(low, high), (__m512bh)_mm512_unpackhi_epi8(low, high)};
}

static inline Operands operands(const bf16 *unit) {
    return {(__m512bh)_mm512_loadu_si512(unit), (__m512bh)_mm512_loadu_si512(unit + 32)};
}

static inline Operands operands(const Int8 *unit) {
    auto bytes = [](const uint8_t *from) { return _mm512_load_si512(from); };
    __m512i x = _mm512_loadu_si512(unit);
    __m512i low = _mm512_permutex2var_epi8(bytes(MAGNITUDES.low), x, bytes(MAGNITUDES.low + 64));
    __m512i high = _mm512_permutex2var_epi8(bytes(MAGNITUDES.high), x, bytes(MAGNITUDES.high + 64));
    return unpacked(low, _mm512_ternarylogic_epi32(high, x, _mm512_set1_epi8(-128), 0xf8));  // high | x & sign
}

static inline Operands operands(const Int4 *unit) {
    auto bytes = [](const uint8_t *from) {
        return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(from)));
    };
    __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(unit)));
    // (x | x << 4) & 0x0f0f
    x = _mm512_ternarylogic_epi32(x, _mm512_slli_epi16(x, 4), _mm512_set1_epi8(15), 0xa8);
    return unpacked(_mm512_shuffle_epi8(bytes(NIBBLES.low), x), _mm512_shuffle_epi8(bytes(NIBBLES.high), x));
}

#else

static inline int place(int output, int input) { return output * 2 + input; }

static inline uint8_t encoded(int8_t weight) { return uint8_t(weight); }

// Of 8 outputs, beginning with 8 * c, the weights of a unit's first or second input.
static inline __m256 widened(const bf16 *unit, int c, int second) {
    __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(unit) + c);
    return _mm256_castsi256_ps(second ? _mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000)))
                                      : _mm256_slli_epi32(pairs, 16));
}

static inline __m256 widened(const Int8 *unit, int c, int second) {
    __m256i pairs = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(unit) + c));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, second ? 16 : 24), 24));
}

static inline __m256 widened(const Int4 *unit, int c, int second) {
    __m256i pairs = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(unit + 8 * c)));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, second ? 24 : 28), 28));
}

#endif
