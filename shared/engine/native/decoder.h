// The forward of a decoder described by data: any model whose layers are a norm, attention with rotary positions, a
// norm and a gated MLP, each added to what came in.
#pragma once

#include <vector>

#include "attention.h"
#include "linear.h"

enum Activation { SILU = 0, GELU_TANH = 1 };

// Weights of norms are floats, [hidden] or, for queries and keys, [head_dim]; null where there is no such norm.
struct Layer {
    const float *attention_norm, *query_norm, *key_norm, *attention_out_norm, *mlp_norm, *mlp_out_norm;
    Matrix qkv, attention_out, gate_up, mlp_out;
    const float *cosines, *sines;  // [positions, rotary_dim / 2]
    Attention attention;
};

// `head` is in bf16. `gate_up`: 16 outputs of the one and 16 of the other in each panel. `embedding` [vocabulary, hidden],
// or null if the head's own weights are. `logit_softcap` 0: none.
struct Decoder {
    const bf16 *embedding;
    Matrix head;
    const float *final_norm;
    const Layer *layers;
    int32_t num_layers, hidden, mlp, num_heads, head_dim, rotary_dim, activation;
    float norm_eps, embedding_scale, logit_softcap;
};

// What the tokens of a step look like on their way: before each of these layers, or with the number of layers as the head
// sees it, behind the last one and its norm. `out` [tokens, num, hidden].
struct Captures {
    const int32_t *layers;
    int64_t num;
    float *out;
};

static inline Floats activate(int activation, Floats x) {
    if (activation == SILU) return x / (1.0f + exp(-x));
    return 0.5f * x * (1.0f + tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
}

// What a row is multiplied by in RMS normalisation (Zhang and Sennrich 2019).
static inline float rms_scale(const float *x, int64_t n, float eps) {
    Floats squares[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) squares[j] += load(x + i + j * LANES) * load(x + i + j * LANES);
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (; i < n; i++) total += x[i] * x[i];
    return 1.0f / __builtin_sqrtf(total / float(n) + eps);
}

// One head's query or key in place: normalised, if there are weights for it, and turned by its position.
static inline void place_head(float *x, const Decoder &model, const Layer &layer, const float *norm, int64_t position) {
    if (norm) {
        float scale = rms_scale(x, model.head_dim, model.norm_eps);
        for (int d = 0; d < model.head_dim; d++) x[d] = x[d] * scale * norm[d];
    }
    int half = model.rotary_dim / 2;
    const float *cosines = layer.cosines + position * half, *sines = layer.sines + position * half;
    for (int d = 0; d < half; d++) {
        float a = x[d], b = x[d + half];
        x[d] = a * cosines[d] - b * sines[d];
        x[d + half] = b * cosines[d] + a * sines[d];
    }
}

// A step's numbers between its products; kept from step to step.
struct Activations {
    std::vector<float> stream, qkv, out, partial;
    std::vector<Input> input, wide_input;
    std::vector<int64_t> sequence_of;
};

// Called by every thread of a team. Rows of `stream`, normalised, into `inputs`.
static inline void normalise_rows(const float *stream, const float *norm, int64_t hidden, float eps, int64_t num_rows,
                                  const int64_t *rows, Inputs inputs) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const float *x = stream + (rows ? rows[r] : r) * hidden;
        float scale = rms_scale(x, hidden, eps);
        Input *to = inputs.row(r);
        int64_t k = 0;
        for (; k + LANES <= hidden; k += LANES) store(to + k, load(x + k) * scale * load(norm + k));
        for (; k < hidden; k++) store_rounded(to + k, x[k] * scale * norm[k]);
    }
}

// Called by every thread of a team. stream += product, through a norm if there is one.
static inline void add_product(Team &team, const Matrix &matrix, Inputs inputs, const float *norm, float eps,
                               int64_t num_rows, const Matrix &next, float *out, float *stream) {
    int64_t hidden = matrix.out;
    linear(team, matrix, inputs, num_rows, &next, [&](int64_t row, int64_t column, int64_t n, const float *values) {
        float *to = (norm ? out : stream) + row * hidden + column;
        for (int64_t i = 0; i < n; i++) to[i] = norm ? values[i] : to[i] + values[i];
    });
    if (!norm) return;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < num_rows; r++) {
        const float *x = out + r * hidden;
        float scale = rms_scale(x, hidden, eps);
        for (int64_t i = 0; i < hidden; i++) stream[r * hidden + i] += x[i] * scale * norm[i];
    }
}

// Called by every thread of a team. stream[t] = the embedding of tokens[t].
static inline void embed(const Decoder &model, const int64_t *tokens, int64_t num_tokens, float *stream) {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_tokens; t++) {
        float *x = stream + t * model.hidden;
        const bf16 *panel = model.head.panel<bf16>(tokens[t] / PANEL) + tokens[t] % PANEL * 2;
        for (int64_t k = 0; k < model.hidden; k++) {
            bf16 value = model.embedding ? model.embedding[tokens[t] * model.hidden + k]
                                         : panel[k / 2 * PANEL * 2 + k % 2];
            x[k] = to_float(value) * model.embedding_scale;
        }
    }
}

// Called by every thread of a team. What is to be kept of `stream` [T, hidden] before that layer.
static inline void capture(const Decoder &model, const Captures &captures, int layer, int64_t num_tokens,
                           const float *stream) {
    for (int64_t c = 0; c < captures.num; c++) {
        if (captures.layers[c] != layer) continue;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < num_tokens; t++) {
            const float *x = stream + t * model.hidden;
            float *to = captures.out + (t * captures.num + c) * model.hidden;
            bool last = layer == model.num_layers;
            float scale = last ? rms_scale(x, model.hidden, model.norm_eps) : 1.0f;
            for (int64_t k = 0; k < model.hidden; k++) to[k] = last ? x[k] * scale * model.final_norm[k] : x[k];
        }
    }
}

// Called by every thread of a team. One layer over `stream` [T, hidden]; T is the pool's type.
template <class T>
static void run_layer(Team &team, const Decoder &model, int index, const Pool &pool, const Batch &batch, Plan &plan,
                      Activations &a) {
    const Layer &layer = model.layers[index];
    int64_t num_tokens = batch.num_tokens, hidden = model.hidden, num_heads = model.num_heads, dim = model.head_dim;
    int64_t kv_heads = pool.num_kv_heads, qkv_width = (num_heads + 2 * kv_heads) * dim;
    float *qkv = a.qkv.data(), *stream = a.stream.data();
    Inputs input(a.input.data(), hidden), attended(a.wide_input.data(), num_heads * dim);
    Inputs gated(a.wide_input.data(), model.mlp);  // when what was attended to is no longer needed

    normalise_rows(stream, layer.attention_norm, hidden, model.norm_eps, num_tokens, nullptr, input);
    linear(team, layer.qkv, input, num_tokens, &layer.attention_out, [&](int64_t row, int64_t column, int64_t n, const float *values) {
        __builtin_memcpy(qkv + row * qkv_width + column, values, n * sizeof(float));
    });
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_tokens; t++) {
        int64_t sequence = a.sequence_of[t], slot = batch.slot(sequence, t), position = batch.position(sequence, t);
        const int64_t *table = batch.tables + batch.first_blocks[sequence];
        float *heads = qkv + t * qkv_width, *keys = heads + num_heads * dim, *values = keys + kv_heads * dim;
        for (int h = 0; h < num_heads; h++) place_head(heads + h * dim, model, layer, layer.query_norm, position);
        for (int h = 0; h < kv_heads; h++) {
            place_head(keys + h * dim, model, layer, layer.key_norm, position);
            write_kv<T>(pool, index, table, slot, h, false, keys + h * dim);
            write_kv<T>(pool, index, table, slot, h, true, values + h * dim);
        }
    }
    attend<T>(
        team, layer.attention, pool, index, batch, plan, a.partial,
        [&](int64_t token, int64_t head) { return qkv + token * qkv_width + head * dim; },
        [&](int64_t token, int64_t head, const float *values) {
            copy_rounded(attended.row(token) + head * dim, values, dim);
        });
    add_product(team, layer.attention_out, attended, layer.attention_out_norm, model.norm_eps, num_tokens,
                layer.gate_up, a.out.data(), stream);

    normalise_rows(stream, layer.mlp_norm, hidden, model.norm_eps, num_tokens, nullptr, input);
    constexpr int HALF = PANEL / 2;
    linear(team, layer.gate_up, input, num_tokens, &layer.mlp_out, [&](int64_t row, int64_t column, int64_t, const float *values) {
        // What is no gate's gives 0, and rows have room for it.
        for (int i = 0; i < HALF; i += LANES)
            store(gated.row(row) + column / 2 + i, activate(model.activation, load(values + i)) * load(values + HALF + i));
    });
    add_product(team, layer.mlp_out, gated, layer.mlp_out_norm, model.norm_eps, num_tokens,
                index + 1 < model.num_layers ? model.layers[index + 1].qkv : model.head, a.out.data(), stream);
}
