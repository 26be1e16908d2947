// Products with weights, in bf16 or quantised, that are laid out for streaming: a step of few rows takes as long as
// reading the weights does.
#pragma once

#include "team.h"
#include "tiles.h"

// Weights of one or several layers with the same input, panel by panel: `bits` 16: bf16, 8: Int8, 4: Int4. `bias` may be
// null. What is quantised has `scales` [groups][panels * PANEL], one for each output and `group` inputs: an even number,
// or all there are.
struct Matrix {
    const void *weight;
    const float *bias, *scales;
    int64_t in, out, group;
    int32_t bits;

    int64_t num_panels() const { return (out + PANEL - 1) / PANEL; }
    int64_t panel_bytes() const { return num_units<bf16>(in) * PANEL * 2 * bits / 8; }
    int64_t num_bytes() const { return num_panels() * panel_bytes(); }
    template <class Weight> const Weight *panel(int64_t i) const {
        return static_cast<const Weight *>(weight) + i * num_units<Weight>(in) * PANEL * UNIT<Weight>;
    }
};

// Rows of inputs, `row_stride` apart. An odd number of inputs has a 0 behind it.
struct Inputs {
    Input *data;
    int64_t stride;

    Inputs(Input *data, int64_t inputs) : data(data), stride(row_stride<Input>(inputs)) {}
    Input *row(int64_t i) const { return data + i * stride; }
    static int64_t size(int64_t rows, int64_t inputs) { return rows * row_stride<Input>(inputs); }
};

// tile[r][0, PANEL) = row r times panel p, without bias.
template <Source FROM>
static inline void multiply_panel(const Multiplier &multiplier, const Matrix &matrix, int64_t p, int64_t num_rows,
                                  const Input *rows, int64_t stride, const bf16 *panel, float *tile, Ahead ahead) {
    multiplier.multiply<FROM>(num_rows, rows, stride, panel, num_units<bf16>(matrix.in), tile, PANEL, ahead);
}

// The same of quantised weights, group by group.
template <Source FROM, class Weight>
static void multiply_panel(const Multiplier &multiplier, const Matrix &matrix, int64_t p, int64_t num_rows,
                           const Input *rows, int64_t stride, const Weight *panel, float *tile, Ahead ahead) {
    alignas(64) float part[Multiplier::MOST_ROWS * PANEL];
    int64_t num = num_units<Weight>(matrix.in), most = num_units<Weight>(matrix.group);
    for (int64_t first = 0, g = 0; first < num; first += most, g++) {
        multiplier.multiply<FROM>(num_rows, rows + first * 2, stride, panel + first * PANEL * UNIT<Weight>,
                                  num - first < most ? num - first : most, part, PANEL, ahead.from(first));
        const float *scales = matrix.scales + (g * matrix.num_panels() + p) * PANEL;
        for (int64_t i = 0; i < num_rows * PANEL; i += LANES) {
            Floats scaled = load(part + i) * load(scales + i % PANEL);
            store(tile + i, g ? load(tile + i) + scaled : scaled);
        }
    }
}

// So many bytes of the next matrix are asked for while the last panels of one, and what comes between them, are computed.
constexpr int64_t FIRST_BYTES = 65536;

// And so many of a panel's followers with each row that is finished of it, where it is asked for as it is read: memory
// would rest meanwhile.
constexpr int64_t BYTES_A_ROW = 128;

// The largest panel of which two, and the rows that they are multiplied by, are sure to be in the second cache together.
constexpr int64_t MOST_BYTES_AHEAD = 262144;

// Asks for what this thread will need first of a matrix.
ALWAYS_INLINE void fetch_first(const Team &team, const Matrix &matrix) {
    int64_t first = team.first_part(matrix.num_panels()) * matrix.panel_bytes(), left = matrix.num_bytes() - first;
    const char *at = static_cast<const char *>(matrix.weight) + first;
    for (int64_t i = 0; i < (left < FIRST_BYTES ? left : FIRST_BYTES); i += 64) _mm_prefetch(at + i, _MM_HINT_T1);
}

// Called by every thread of a team: `finish(row, column, n, values)` gets n sums, with their biases, of each row and
// panel. `next`: the matrix that is multiplied by after this one; null if there is none. Returns when all are done.
template <class Finish>
static void linear(Team &team, const Matrix &matrix, Inputs inputs, int64_t num_rows, const Matrix *next, Finish finish) {
    if (num_rows == 0) return;
    RowBlocks blocks(num_rows, Multiplier::MOST_ROWS);
    Multiplier multiplier;
    multiplier.fit(blocks.longest());
    // Elsewhere such reads are neither ahead of time nor told to those that the CPU itself begins: half as fast.
    static const bool past_caches = __builtin_cpu_is("amd");
    bool few = num_rows <= Multiplier::FEW_ROWS && past_caches;
    int64_t panel_bytes = matrix.panel_bytes(), unit_bytes = panel_bytes / num_units<bf16>(matrix.in);
    // Of how many blocks of rows each asks for its share of the next panel, where the cache has room for two.
    int64_t shares = panel_bytes <= MOST_BYTES_AHEAD ? blocks.count : 1;
    int64_t ahead = shares == 1 ? AHEAD : panel_bytes, step = (unit_bytes + shares - 1) / shares;
    team.share(matrix.num_panels(), [&](int64_t p, int64_t following) {
        const char *whole = static_cast<const char *>(matrix.weight) + p * panel_bytes;
        alignas(64) float tile[Multiplier::MOST_ROWS * PANEL];
        int64_t column = p * PANEL, n = matrix.out - column < PANEL ? matrix.out - column : PANEL;
        for (int64_t b = 0; b < blocks.count; b++) {
            int64_t first = blocks.first(b), rows = blocks.first(b + 1) - first;
            auto multiply_by = [&](auto *panel) {
                const Input *block = inputs.row(first);
                Ahead later{whole + ahead + (shares > 1 ? b * panel_bytes / shares : 0), step};
                if (few) multiply_panel<Source::MEMORY_OF_FEW>(multiplier, matrix, p, rows, block, inputs.stride, panel, tile, later);
                else if (shares == 1 || following >= 0)
                    multiply_panel<Source::MEMORY>(multiplier, matrix, p, rows, block, inputs.stride, panel, tile, later);
                else multiply_panel<Source::CACHE>(multiplier, matrix, p, rows, block, inputs.stride, panel, tile, later);
            };
            if (matrix.bits == 16) multiply_by(matrix.panel<bf16>(p));
            if (matrix.bits == 8) multiply_by(matrix.panel<Int8>(p));
            if (matrix.bits == 4) multiply_by(matrix.panel<Int4>(p));
            for (int64_t r = 0; r < rows; r++) {
                float *values = tile + r * PANEL;
                if (shares == 1 && !few)
                    for (int64_t i = 0; i < BYTES_A_ROW; i += 64)
                        _mm_prefetch(whole + panel_bytes + AHEAD + r * BYTES_A_ROW + i, _MM_HINT_T1);
                if (matrix.bias)
                    for (int64_t i = 0; i < n; i++) values[i] += matrix.bias[column + i];
                finish(first + r, column, n, values);
            }
        }
        if (next && following < 0) fetch_first(team, *next);
    });
}
