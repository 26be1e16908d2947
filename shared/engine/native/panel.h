// The innermost loops of products and of attention: rows times a panel, 32 outputs whose weights are stored side by
// side. A row's result is the same to the bit however many rows it is computed with.
#pragma once

#include "quantised.h"

// Outputs of a panel.
constexpr int PANEL = 32;

// Rows computed at once in registers: as many as leave no accumulator outside one. And those that count as few: of them
// a panel is read once from one end to the other, and takes hardly longer than memory.
#if defined(__AVX512BF16__)
constexpr int MOST_ROWS = 12;
#else
constexpr int MOST_ROWS = 6;
#endif
constexpr int FEW_ROWS = 6;

// What panels in bf16 are multiplied by: AVX-512 multiplies pairs of bf16, AVX2 only floats.
#if defined(__AVX512BF16__)
using Input = bf16;
#else
using Input = float;
#endif

// A panel is [units][PANEL], and a unit two inputs, or one as float. So many of these make one.
template <class Weight> constexpr int UNIT = 2;
template <> constexpr int UNIT<float> = 1;
template <> constexpr int UNIT<Int4> = 1;

template <class Weight> static inline int64_t num_units(int64_t inputs) {
    return std::is_same_v<Weight, float> ? inputs : (inputs + 1) / 2;
}

// What rows that are multiplied by panels of these weights are made of.
template <class Weight> struct Multiplied { using Type = Input; };
template <> struct Multiplied<float> { using Type = float; };

// Numbers from one row of inputs to the next: whole cache lines, and an odd number of them, as rows that are a power
// of two apart would drive one another out of the cache.
template <class T> static inline int64_t row_stride(int64_t inputs) {
    constexpr int64_t LINE = 64 / sizeof(T);
    return ((inputs + LINE - 1) / LINE | 1) * LINE;
}

// Splits rows into blocks of at most `most`, none more than one longer than another, and the last one of the longest.
struct RowBlocks {
    int64_t rows, count;

    RowBlocks(int64_t rows, int64_t most) : rows(rows), count((rows + most - 1) / most) {}
    int64_t longest() const { return rows - first(count - 1); }
    int64_t first(int64_t block) const { return block * rows / count; }
};

// Where weights come from. Memory is asked for ahead: for the second cache, which has more reads under way than the
// first, and from there again for the first; or, of few rows, where the CPU can, at once for the first and past the
// others, as they are left to what the processes around a step need for it.
enum class Source { CACHE, MEMORY, MEMORY_OF_FEW };

// So many bytes ahead, where a panel is read once: from memory, from the second cache, and from memory of few rows.
constexpr int AHEAD = 8192, NEAR = 2048, AHEAD_OF_FEW = 4096;

// What is asked for while a panel from MEMORY is multiplied: from `at` on, `step` bytes with each unit. A panel that
// several blocks of rows go through is read from memory by the first and from the cache by the others; asked for while
// all of those before it are computed with, its reading takes no time of its own.
struct Ahead {
    const char *at;
    int64_t step;

    Ahead from(int64_t unit) const { return {at + unit * step, step}; }
};

template <Source FROM, class Weight> ALWAYS_INLINE void fetch(const Weight *unit, const char *ahead) {
    constexpr int BYTES = PANEL * UNIT<Weight> * sizeof(Weight);
    const char *here = reinterpret_cast<const char *>(unit);
    for (int line = 0; line < BYTES; line += 64) {
        if constexpr (FROM == Source::MEMORY) {
            _mm_prefetch(ahead + line, _MM_HINT_T1);
            _mm_prefetch(here + NEAR + line, _MM_HINT_T0);
        }
        if constexpr (FROM == Source::MEMORY_OF_FEW) _mm_prefetch(here + AHEAD_OF_FEW + line, _MM_HINT_NTA);
    }
}

// to[r][0, PANEL) = row r times the panel, summed up in the order of the inputs; strides in numbers.
template <int R, Source FROM>
static void multiply(const float *rows, int64_t stride, const float *panel, int64_t units, float *to, int64_t to_stride,
                     Ahead ahead) {
    // Of few rows a whole panel at once, of more, in narrow registers, first one half and then the other.
    constexpr int ALL = PANEL / LANES, COLUMNS = R <= 3 ? ALL : 2;
    for (int first = 0; first < ALL; first += COLUMNS) {
        Floats sums[R][COLUMNS] = {};
        for (int64_t k = 0; k < units; k++) {
            const float *at = panel + k * PANEL;
            if (first == 0) fetch<FROM>(at, ahead.at + k * ahead.step);
            Floats w[COLUMNS];
#pragma GCC unroll 16
            for (int c = 0; c < COLUMNS; c++) w[c] = load(at + (first + c) * LANES);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++)
#pragma GCC unroll 16
                for (int c = 0; c < COLUMNS; c++) sums[r][c] += rows[r * stride + k] * w[c];
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int c = 0; c < COLUMNS; c++) store(to + r * to_stride + (first + c) * LANES, sums[r][c]);
    }
}

#if defined(__AVX512BF16__)
template <int R, Source FROM, class Weight>
static void multiply(const bf16 *rows, int64_t stride, const Weight *panel, int64_t units, float *to, int64_t to_stride,
                     Ahead ahead) {
    __m512 sums[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t j = 0; j < units; j++) {
        const Weight *unit = panel + j * PANEL * UNIT<Weight>;
        fetch<FROM>(unit, ahead.at + j * ahead.step);
        Operands w = operands(unit);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int32_t pair;
            __builtin_memcpy(&pair, rows + r * stride + j * 2, 4);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], x, w.first);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], x, w.second);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < 2; c++) _mm512_storeu_ps(to + r * to_stride + c * 16, sums[r][c]);
}
#else
// Narrow registers hold the sums of more than three rows for half a panel only. Of few rows so many units at a time are
// multiplied for the one half and then, from the first cache, for the other: memory is read all the while. A whole panel
// at a time it would rest while the second half is computed; but of many rows, whose arithmetic takes longer than
// reading does, that saves putting sums away and taking them up again.
constexpr int64_t UNITS_AT_ONCE = 16;

// Units [begin, end) of columns from `first` on; adds to what `to` holds of units before them.
template <int R, int COLUMNS, Source FROM, class Weight>
ALWAYS_INLINE void multiply_columns(int first, const float *rows, int64_t stride, const Weight *panel, int64_t begin,
                                    int64_t end, float *to, int64_t to_stride, Ahead ahead) {
    __m256 sums[R][COLUMNS];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; c++)
            sums[r][c] = begin ? _mm256_loadu_ps(to + r * to_stride + (first + c) * 8) : _mm256_setzero_ps();
    for (int64_t j = begin; j < end; j++) {
        const Weight *unit = panel + j * PANEL * UNIT<Weight>;
        if (first == 0) fetch<FROM>(unit, ahead.at + j * ahead.step);
#pragma GCC unroll 2
        for (int second = 0; second < 2; second++) {
            __m256 w[COLUMNS];
#pragma GCC unroll 16
            for (int c = 0; c < COLUMNS; c++) w[c] = widened(unit, first + c, second);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                __m256 value = _mm256_broadcast_ss(rows + r * stride + j * 2 + second);
#pragma GCC unroll 16
                for (int c = 0; c < COLUMNS; c++) sums[r][c] = _mm256_fmadd_ps(value, w[c], sums[r][c]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < COLUMNS; c++) _mm256_storeu_ps(to + r * to_stride + (first + c) * 8, sums[r][c]);
}

template <int R, Source FROM, class Weight>
static void multiply(const float *rows, int64_t stride, const Weight *panel, int64_t units, float *to, int64_t to_stride,
                     Ahead ahead) {
    constexpr int COLUMNS = R <= 3 ? 4 : 2;
    const int64_t at_once = R <= 3 || FROM != Source::MEMORY_OF_FEW ? units : UNITS_AT_ONCE;
    for (int64_t begin = 0; begin < units; begin += at_once) {
        int64_t end = begin + at_once < units ? begin + at_once : units;
        for (int first = 0; first < 4; first += COLUMNS)
            multiply_columns<R, COLUMNS, FROM>(first, rows, stride, panel, begin, end, to, to_stride, ahead);
    }
}
#endif

// As above, for 1 to MOST_ROWS rows.
template <Source FROM, class Row, class Weight>
static inline void multiply(int64_t num_rows, const Row *rows, int64_t stride, const Weight *panel, int64_t units,
                            float *to, int64_t to_stride, Ahead ahead = {nullptr, 0}) {
    switch (num_rows) {
#define ROWS(R) case R: return multiply<R, FROM>(rows, stride, panel, units, to, to_stride, ahead);
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if defined(__AVX512BF16__)
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
#undef ROWS
    }
}

// Multiplies blocks of at most MOST_ROWS rows, by any number of panels, once it was told how many the longest has.
struct Registers {
    static constexpr int64_t MOST_ROWS = ::MOST_ROWS, FEW_ROWS = ::FEW_ROWS;

    void fit(int64_t) {}

    template <Source FROM, class Row, class Weight>
    void multiply(int64_t num_rows, const Row *rows, int64_t stride, const Weight *panel, int64_t units, float *to,
                  int64_t to_stride, Ahead ahead = {nullptr, 0}) const {
        ::multiply<FROM>(num_rows, rows, stride, panel, units, to, to_stride, ahead);
    }
};
