// Vectors of floats as wide as the CPU has them, and bf16 numbers, which are the upper halves of floats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <immintrin.h>
#include <type_traits>

using bf16 = uint16_t;

// For functions that only ask memory for something: GCC 12 takes them for such that do nothing, and drops the calls.
#define ALWAYS_INLINE __attribute__((always_inline)) static inline

#if defined(__AVX512BF16__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef float LooseFloats __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

constexpr float INFINITE = __builtin_inff();

static inline Floats load(const float *from) { return *reinterpret_cast<const LooseFloats *>(from); }

static inline void store(float *to, Floats x) { *reinterpret_cast<LooseFloats *>(to) = x; }

static inline Floats broadcast(float x) { return x - Floats{}; }

static inline float to_float(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float out;
    __builtin_memcpy(&out, &bits, 4);
    return out;
}

static inline float to_float(float x) { return x; }

// To the nearest bf16, ties to even; not-a-numbers stay such.
static inline bf16 to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bf16(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// As whatever the place is for.
static inline void store_rounded(bf16 *to, float x) { *to = to_bf16(x); }
static inline void store_rounded(float *to, float x) { *to = x; }

static inline Floats load(const bf16 *from) {
#if defined(__AVX512BF16__)
    __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
    return Floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
#else
    __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return Floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
#endif
}

static inline void store(bf16 *to, Floats x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(__m512(x)));
#else
    Ints bits = Ints(x);
    bits = (x != x) ? (Ints{} + 0x7fc0) : ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 & 0xffff);
    __m256i packed = _mm256_packus_epi32(__m256i(bits), __m256i(bits));
    __m128i narrow = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to), narrow);
#endif
}

// n numbers, rounded as whatever the place is for.
template <class To, class From> static inline void copy_rounded(To *to, const From *from, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(from + i));
    for (; i < n; i++) store_rounded(to + i, to_float(from[i]));
}

static inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// The sum and the largest of a vector's numbers, half by half: in an order that is always the same.
#if defined(__AVX512BF16__)
static inline float sum(Floats x) { return _mm512_reduce_add_ps(__m512(x)); }

static inline float largest(Floats x) { return _mm512_reduce_max_ps(__m512(x)); }
#else
template <class Both> static inline float halve(Floats x, Both both) {
    __m128 four = both(_mm256_castps256_ps128(__m256(x)), _mm256_extractf128_ps(__m256(x), 1));
    __m128 two = both(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(both(two, _mm_shuffle_ps(two, two, 1)));
}

static inline float sum(Floats x) {
    return halve(x, [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}

static inline float largest(Floats x) {
    return halve(x, [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
#endif

// e^x to within 2 units in the last place, 1 at 0; below -87.3 it stays at the smallest normal number.
static inline Floats exp(Floats x) {
    x = x < -87.3f ? broadcast(-87.3f) : x;
    x = x > 88.3f ? broadcast(88.3f) : x;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    Floats n = (x * 1.44269504f + to_integer) - to_integer;
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = broadcast(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    return y * Floats(exponent);
}

static inline Floats tanh(Floats x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }
