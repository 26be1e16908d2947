// Products with weights in bf16 that are laid out for streaming: a step of few rows takes as long as reading the
// weights does, and a row's result is the same to the bit however many rows it is computed with.
#pragma once

#include "simd.h"

// Outputs of a panel, the unit in which weights are stored, [in / 2][PANEL][2], and handed to threads.
constexpr int PANEL = 32;

// Rows computed at once: as many as leave no accumulator outside a register.
#if defined(__AVX512BF16__)
constexpr int MOST_ROWS = 12;
#else
constexpr int MOST_ROWS = 6;
#endif

// Weights of one or several layers with the same input. `bias` may be null.
struct Matrix {
    const bf16 *weight;
    const float *bias;
    int64_t in, out;

    int64_t num_pairs() const { return (in + 1) / 2; }
    int64_t num_panels() const { return (out + PANEL - 1) / PANEL; }
    const bf16 *panel(int64_t i) const { return weight + i * num_pairs() * PANEL * 2; }
};

// Splits rows into blocks of at most MOST_ROWS, none more than one longer than another.
struct RowBlocks {
    int64_t rows, count;

    explicit RowBlocks(int64_t rows) : rows(rows), count((rows + MOST_ROWS - 1) / MOST_ROWS) {}
    int64_t first(int64_t block) const { return block * rows / count; }
    int64_t of(int64_t row) const { return ((row + 1) * count - 1) / rows; }
};

// Inputs [rows, in] laid out as the kernel reads them, block by block: [in / 2][rows of the block][2]. An odd number
// of inputs is filled up with 0.
#if defined(__AVX512BF16__)
using Input = bf16;
#else
using Input = float;
#endif

static inline int64_t input_size(int64_t rows, int64_t in) { return rows * (in + in % 2); }

// Where a row's numbers go in packed inputs: pairs of them, each `stride` from the one before.
struct PackedRow {
    Input *first;
    int64_t stride;

    PackedRow(Input *packed, RowBlocks blocks, int64_t row, int64_t in) {
        int64_t block = blocks.of(row), begin = blocks.first(block);
        stride = (blocks.first(block + 1) - begin) * 2;
        first = packed + input_size(begin, in) + (row - begin) * 2;
    }
    void put(int64_t pair, float a, float b) const {
        Input *place = first + pair * stride;
#if defined(__AVX512BF16__)
        place[0] = to_bf16(a), place[1] = to_bf16(b);
#else
        place[0] = a, place[1] = b;
#endif
    }
    // All numbers of the row, `value(k)` the k-th of `in`.
    template <class Value> void put_all(int64_t in, Value value) const {
        for (int64_t k = 0; k + 2 <= in; k += 2) put(k / 2, value(k), value(k + 1));
        if (in % 2) put(in / 2, value(in - 1), 0.0f);
    }
};

// How many weights ahead memory is asked for: 8 KiB.
constexpr int AHEAD = 4096;

static inline void fetch(const bf16 *pairs) {
    _mm_prefetch(pairs, _MM_HINT_T0);
    _mm_prefetch(pairs + PANEL, _MM_HINT_T0);
}

// [R rows, PANEL] = rows * panel, summed up in the order of the inputs.
template <int R> static void multiply(const Input *input, const bf16 *weight, int64_t num_pairs, float *tile) {
#if defined(__AVX512BF16__)
    __m512 sums[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    for (int64_t j = 0; j < num_pairs; j++) {
        const bf16 *at = weight + j * PANEL * 2;
        fetch(at + AHEAD);
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(at), w1 = (__m512bh)_mm512_loadu_si512(at + PANEL);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int32_t pair;
            __builtin_memcpy(&pair, input + (j * R + r) * 2, 4);
            __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], x, w0);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], x, w1);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int c = 0; c < 2; c++) _mm512_store_ps(tile + r * PANEL + c * 16, sums[r][c]);
#else
    // Of few rows a whole panel at once, of more first one half and then the other: 12 accumulators at most.
    constexpr int COLUMNS = R <= 3 ? 4 : 2;
    for (int half = 0; half < 4; half += COLUMNS) {
        __m256 sums[R][COLUMNS];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = _mm256_setzero_ps();
        for (int64_t j = 0; j < num_pairs; j++) {
            const bf16 *pairs = weight + j * PANEL * 2;
            if (half == 0) fetch(pairs + AHEAD);
            const __m256i *at = reinterpret_cast<const __m256i *>(pairs) + half;
            const float *x = input + j * R * 2;
            for (int odd = 0; odd < 2; odd++) {
                __m256 w[COLUMNS];
#pragma GCC unroll 16
                for (int c = 0; c < COLUMNS; c++) {
                    __m256i pair = _mm256_loadu_si256(at + c);
                    pair = odd ? _mm256_and_si256(pair, _mm256_set1_epi32(int(0xffff0000))) : _mm256_slli_epi32(pair, 16);
                    w[c] = _mm256_castsi256_ps(pair);
                }
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    __m256 value = _mm256_broadcast_ss(x + r * 2 + odd);
#pragma GCC unroll 16
                    for (int c = 0; c < COLUMNS; c++) sums[r][c] = _mm256_fmadd_ps(value, w[c], sums[r][c]);
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int c = 0; c < COLUMNS; c++) _mm256_store_ps(tile + r * PANEL + (half + c) * 8, sums[r][c]);
    }
#endif
}

static inline void multiply(int rows, const Input *input, const bf16 *weight, int64_t num_pairs, float *tile) {
    switch (rows) {
#define ROWS(R) case R: return multiply<R>(input, weight, num_pairs, tile);
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#if defined(__AVX512BF16__)
        ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#endif
#undef ROWS
    }
}

// Called by every thread of a team: `finish(row, column, n, values)` gets n sums, with their biases, of each row and
// panel. Returns when all are done.
template <class Finish> static void linear(const Matrix &matrix, const Input *packed, int64_t num_rows, Finish finish) {
    RowBlocks blocks(num_rows);
#pragma omp for schedule(dynamic)
    for (int64_t p = 0; p < matrix.num_panels(); p++) {
        alignas(64) float tile[MOST_ROWS * PANEL];
        int64_t column = p * PANEL, n = matrix.out - column < PANEL ? matrix.out - column : PANEL;
        for (int64_t b = 0; b < blocks.count; b++) {
            int64_t first = blocks.first(b), rows = blocks.first(b + 1) - first;
            multiply(int(rows), packed + input_size(first, matrix.in), matrix.panel(p), matrix.num_pairs(), tile);
            for (int64_t r = 0; r < rows; r++) {
                float *values = tile + r * PANEL;
                if (matrix.bias)
                    for (int64_t i = 0; i < n; i++) values[i] += matrix.bias[column + i];
                finish(first + r, column, n, values);
            }
        }
    }
}
