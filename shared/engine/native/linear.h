// Products with weights, in bf16 or quantised, that are laid out for streaming: a step of few rows takes as long as
// reading the weights does.
#pragma once

#include "panel.h"
#include "team.h"

// Weights of one or several layers with the same input, panel by panel: `bits` 16: bf16, 8: Int8, 4: Int4. `bias` may be
// null. What is quantised has `scales` [groups][panels * PANEL], one for each output and `group` inputs: an even number,
// or all there are.
struct Matrix {
    const void *weight;
    const float *bias, *scales;
    int64_t in, out, group;
    int32_t bits;

    int64_t num_panels() const { return (out + PANEL - 1) / PANEL; }
    int64_t num_bytes() const { return num_panels() * num_units<bf16>(in) * PANEL * 2 * bits / 8; }
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
static inline void multiply_panel(const Matrix &matrix, int64_t p, int64_t num_rows, const Input *rows, int64_t stride,
                                  const bf16 *panel, float *tile) {
    multiply<FROM>(num_rows, rows, stride, panel, num_units<bf16>(matrix.in), tile, PANEL);
}

// The same of quantised weights, group by group.
template <Source FROM, class Weight>
static void multiply_panel(const Matrix &matrix, int64_t p, int64_t num_rows, const Input *rows, int64_t stride,
                           const Weight *panel, float *tile) {
    alignas(64) float part[MOST_ROWS * PANEL];
    int64_t num = num_units<Weight>(matrix.in), most = num_units<Weight>(matrix.group);
    for (int64_t first = 0, g = 0; first < num; first += most, g++) {
        multiply<FROM>(num_rows, rows + first * 2, stride, panel + first * PANEL * UNIT<Weight>,
                              num - first < most ? num - first : most, part, PANEL);
        const float *scales = matrix.scales + (g * matrix.num_panels() + p) * PANEL;
        for (int64_t i = 0; i < num_rows * PANEL; i += LANES) {
            Floats scaled = load(part + i) * load(scales + i % PANEL);
            store(tile + i, g ? load(tile + i) + scaled : scaled);
        }
    }
}

// Called by every thread of a team: `finish(row, column, n, values)` gets n sums, with their biases, of each row and
// panel. Returns when all are done.
template <class Finish>
static void linear(Team &team, const Matrix &matrix, Inputs inputs, int64_t num_rows, Finish finish) {
    RowBlocks blocks(num_rows);
    bool once = num_rows <= MOST_ROWS_OF_ONE_READING;
    team.share(matrix.num_panels(), [&](int64_t p, int64_t) {
        alignas(64) float tile[MOST_ROWS * PANEL];
        int64_t column = p * PANEL, n = matrix.out - column < PANEL ? matrix.out - column : PANEL;
        for (int64_t b = 0; b < blocks.count; b++) {
            int64_t first = blocks.first(b), rows = blocks.first(b + 1) - first;
            auto multiply_by = [&](auto *panel) {
                const Input *block = inputs.row(first);
                if (once) multiply_panel<Source::MEMORY_ONCE>(matrix, p, rows, block, inputs.stride, panel, tile);
                else multiply_panel<Source::MEMORY>(matrix, p, rows, block, inputs.stride, panel, tile);
            };
            if (matrix.bits == 16) multiply_by(matrix.panel<bf16>(p));
            if (matrix.bits == 8) multiply_by(matrix.panel<Int8>(p));
            if (matrix.bits == 4) multiply_by(matrix.panel<Int4>(p));
            for (int64_t r = 0; r < rows; r++) {
                float *values = tile + r * PANEL;
                if (matrix.bias)
                    for (int64_t i = 0; i < n; i++) values[i] += matrix.bias[column + i];
                finish(first + r, column, n, values);
            }
        }
    });
}
