// Products with weights in bf16 that are laid out for streaming: a step of few rows takes as long as reading the
// weights does.
#pragma once

#include "panel.h"
#include "team.h"

// Weights of one or several layers with the same input, panel by panel. `bias` may be null.
struct Matrix {
    const bf16 *weight;
    const float *bias;
    int64_t in, out;

    int64_t num_panels() const { return (out + PANEL - 1) / PANEL; }
    const bf16 *panel(int64_t i) const { return weight + i * num_units<bf16>(in) * PANEL * UNIT<bf16>; }
};

// Rows of inputs, `row_stride` apart. An odd number of inputs has a 0 behind it.
struct Inputs {
    Input *data;
    int64_t stride;

    Inputs(Input *data, int64_t inputs) : data(data), stride(row_stride<Input>(inputs)) {}
    Input *row(int64_t i) const { return data + i * stride; }
    static int64_t size(int64_t rows, int64_t inputs) { return rows * row_stride<Input>(inputs); }
};

// Called by every thread of a team: `finish(row, column, n, values)` gets n sums, with their biases, of each row and
// panel. Returns when all are done.
template <class Finish>
static void linear(Team &team, const Matrix &matrix, Inputs inputs, int64_t num_rows, Finish finish) {
    RowBlocks blocks(num_rows);
    team.share(matrix.num_panels(), [&](int64_t p, int64_t) {
        alignas(64) float tile[MOST_ROWS * PANEL];
        int64_t column = p * PANEL, n = matrix.out - column < PANEL ? matrix.out - column : PANEL;
        for (int64_t b = 0; b < blocks.count; b++) {
            int64_t first = blocks.first(b), rows = blocks.first(b + 1) - first;
            multiply<FROM_MEMORY>(rows, inputs.row(first), inputs.stride, matrix.panel(p), num_units<bf16>(matrix.in),
                                  tile, PANEL);
            for (int64_t r = 0; r < rows; r++) {
                float *values = tile + r * PANEL;
                if (matrix.bias)
                    for (int64_t i = 0; i < n; i++) values[i] += matrix.bias[column + i];
                finish(first + r, column, n, values);
            }
        }
    });
}
