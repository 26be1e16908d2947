// The innermost loop of products on CPUs with AMX, whose tiles multiply 16 rows in the time of one. As of registers'
// products, a row's result is the same to the bit however many rows it is computed with.
#pragma once

#include "panel.h"

#if defined(__AMX_BF16__)

// Rows of a tile, of inputs as of weights. Of weights, a row is a unit of 16 outputs.
constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;
constexpr int HALF_PANEL = PANEL / 2;

// As `Registers`, on the thread that it was made on. The first half of a block's rows are one tile, the others a second
// one, if they are more than one holds.
class Tiles {
public:
    static constexpr int64_t MOST_ROWS = 2 * TILE_ROWS;
    // Of any number: what is asked of memory first comes to the second cache.
    static constexpr int64_t FEW_ROWS = 0;

    Tiles() = default;
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles &) = delete;

    void fit(int64_t rows) {
        if (rows == upper + lower) return;
        upper = rows > TILE_ROWS ? (rows + 1) / 2 : rows, lower = rows - upper;
        Shapes shapes;
        const int64_t each[] = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS};
        for (int i = 0; i < 8; i++) shapes.rows[i] = each[i], shapes.row_bytes[i] = each[i] ? TILE_BYTES : 0;
        _tile_loadconfig(&shapes);
    }

    // As many rows are computed as it fits, whatever `num_rows`: for so many there are inputs, and room in `to`.
    template <Source FROM, class Weight>
    void multiply(int64_t num_rows, const bf16 *rows, int64_t stride, const Weight *panel, int64_t units, float *to,
                  int64_t to_stride, Ahead ahead = {nullptr, 0}) const {
        alignas(64) bf16 inputs[MOST_ROWS * 2 * TILE_ROWS], weights[TILE_ROWS * PANEL * 2];
        _tile_zero(0);
        _tile_zero(1);
        if (lower) {
            _tile_zero(2);
            _tile_zero(3);
        }
        int64_t j = 0;
        for (; j + TILE_ROWS <= units; j += TILE_ROWS) {
            const Weight *at = panel + j * PANEL * UNIT<Weight>;
            fetch<FROM>(ahead.at + j * ahead.step, TILE_ROWS * ahead.step);
            if constexpr (std::is_same_v<Weight, bf16>) {
                add<FROM>(rows + j * 2, stride, at);
            } else {
                widen(at, TILE_ROWS, weights);
                add<Source::CACHE>(rows + j * 2, stride, weights);
            }
        }
        if (j < units) {  // filled up with zeros
            int64_t left = units - j;
            for (int64_t r = 0; r < upper + lower; r++) {
                __builtin_memset(inputs + r * 2 * TILE_ROWS, 0, TILE_BYTES);
                __builtin_memcpy(inputs + r * 2 * TILE_ROWS, rows + r * stride + j * 2, left * 4);
            }
            __builtin_memset(weights, 0, sizeof weights);
            widen(panel + j * PANEL * UNIT<Weight>, left, weights);
            add<Source::CACHE>(inputs, 2 * TILE_ROWS, weights);
        }
        _tile_stored(0, to, to_stride * 4);
        _tile_stored(1, to + HALF_PANEL, to_stride * 4);
        if (lower) {
            float *below = to + upper * to_stride;
            _tile_stored(2, below, to_stride * 4);
            _tile_stored(3, below + HALF_PANEL, to_stride * 4);
        }
    }

private:
    // What the CPU is told of its tiles: 0 to 3 hold sums, of the upper rows and of the lower ones, each of both halves
    // of a panel; 4 and 5 their inputs, and 6 and 7 the halves.
    struct alignas(64) Shapes {
        uint8_t palette = 1, first_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    };

    // Adds what 16 units make of their inputs. Those from memory pass the first cache by: it is left to the inputs, which
    // every panel needs.
    template <Source FROM> void add(const bf16 *rows, int64_t stride, const bf16 *units) const {
        constexpr int UNIT_BYTES = PANEL * 4;
        asm volatile("" ::: "memory");  // what is written by now is there: GCC 12 does not know that tiles are read from it
        if constexpr (FROM == Source::MEMORY) _tile_stream_loadd(6, units, UNIT_BYTES);
        else _tile_loadd(6, units, UNIT_BYTES);
        _tile_loadd(4, rows, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (FROM == Source::MEMORY) _tile_stream_loadd(7, units + PANEL, UNIT_BYTES);
        else _tile_loadd(7, units + PANEL, UNIT_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (lower) {
            _tile_loadd(5, rows + upper * stride, stride * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }

    template <class Weight> static void widen(const Weight *units, int64_t num, bf16 *to) {
        for (int64_t u = 0; u < num; u++) {
            Operands both = operands(units + u * PANEL * UNIT<Weight>);
            _mm512_store_si512(to + u * PANEL * 2, (__m512i)both.first);
            _mm512_store_si512(to + u * PANEL * 2 + PANEL, (__m512i)both.second);
        }
    }

    template <Source FROM> ALWAYS_INLINE void fetch(const char *ahead, int64_t bytes) {
        if constexpr (FROM == Source::MEMORY)
            for (int64_t line = 0; line < bytes; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T1);
    }

    int64_t upper = 0, lower = 0;
};

using Multiplier = Tiles;

#else

using Multiplier = Registers;

#endif
