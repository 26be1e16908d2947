// Standard Gumbel noise that belongs to a position and a token, as shared/sampling/noise.py has it.
#pragma once

#include <cstdint>
#include <cstring>

// SplitMix64 (Steele, Lea and Flood 2014): how far the entries of a stream are apart, and the finalizer.
constexpr uint64_t INCREMENT = 0x9E3779B97F4A7C15;

static inline uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

// A whole number below 2^52, exactly.
static inline double whole(uint64_t number) {
    uint64_t bits = number | 0x4330000000000000;  // 2^52 more
    double shifted;
    memcpy(&shifted, &bits, sizeof bits);
    return shifted - 0x1p52;
}

// Natural logarithm of a positive normal number, within one unit in the last place: the algorithm of fdlibm's e_log.c
// (Sun Microsystems 1993), without branches, so that several are computed at once.
static inline double logarithm(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits += 0x3FF0000000000000 - 0x3FE6A09E00000000;
    double exponent = whole(bits >> 52) - 1023.0;
    bits = (bits & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E00000000;  // between the roots of 1/2 and 2
    double m;
    memcpy(&m, &bits, sizeof bits);
    double f = m - 1.0, s = f / (2.0 + f), z = s * s, w = z * z, half = 0.5 * f * f;
    double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    double odd = z * (6.666666666666735130e-01 +
                      w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    double low = s * (half + odd + even) + exponent * 1.90821492927058770002e-10;
    return low - half + f + exponent * 6.93147180369123816490e-01;
}

// Called by every thread of a team. to(i)[t] = the noise of entry t of the stream of key(i), for `num` of each.
template <class Key, class To> static inline void gumbel(int64_t rows, int64_t num, Key key, To to) {
    constexpr int64_t PART = 1024;
    int64_t parts = (num + PART - 1) / PART;
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < rows * parts; i++) {
        int64_t first = i / rows * PART, last = first + PART < num ? first + PART : num;
        float *part = to(i % rows) + first;
        uint64_t at = key(i % rows) + uint64_t(first) * INCREMENT;
        for (int64_t t = 0; t < last - first; t++) {
            // 52 bits and a half: strictly between 0 and 1, and exact.
            double uniform = (whole(mixed(at + uint64_t(t + 1) * INCREMENT) >> 12) + 0.5) * 0x1p-52;
            part[t] = float(-logarithm(-logarithm(uniform)));
        }
    }
}
