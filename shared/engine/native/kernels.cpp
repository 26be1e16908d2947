// What Python calls, by a C interface on the memory of tensors. Every function runs on `num_threads` threads, and
// returns when it is done; none keeps a pointer to what is Python's.

#include <map>
#include <memory>

#include "decoder.h"
#include "draws.h"
#include "noise_cache.h"

extern "C" {

// So that both sides are known to mean the same.
int64_t outrider_sizes(int which) {
    const int64_t sizes[] = {sizeof(Matrix), sizeof(Pool),    sizeof(Batch),   sizeof(Attention),
                             sizeof(Layer),  sizeof(Decoder), sizeof(Captures)};
    return sizes[which];
}

// Bytes that a matrix takes when it is packed.
int64_t outrider_packed_size(int64_t in, int64_t out, int bits) {
    return Matrix{nullptr, nullptr, nullptr, in, out, in, bits}.num_bytes();
}

// Lays out `rows` rows of weights, `from` [rows, in], as outputs `first` and following of a matrix; what of the last
// panel is nobody's stays as it is.
void outrider_pack(const bf16 *from, int64_t rows, int64_t in, int64_t first, bf16 *packed, int num_threads) {
    int64_t pairs = num_units<bf16>(in);
#pragma omp parallel for num_threads(num_threads)
    for (int64_t r = 0; r < rows; r++) {
        bf16 *to = packed + (first + r) / PANEL * pairs * PANEL * 2 + (first + r) % PANEL * 2;
        for (int64_t k = 0; k < in; k++) to[k / 2 * PANEL * 2 + k % 2] = from[r * in + k];
    }
}

// The same of quantised weights of 8 or 4 bits; `packed` is all 0 before.
void outrider_pack_quantised(const int8_t *from, int64_t rows, int64_t in, int64_t first, int bits, uint8_t *packed,
                             int num_threads) {
    int64_t units = num_units<Int8>(in), bytes = PANEL * 2 * bits / 8;
#pragma omp parallel for num_threads(num_threads)
    for (int64_t r = 0; r < rows; r++) {
        uint8_t *panel = packed + (first + r) / PANEL * units * bytes;
        for (int64_t k = 0; k < in; k++) {
            int at = place((first + r) % PANEL, k % 2);
            if (bits == 8) panel[k / 2 * bytes + at] = encoded(from[r * in + k]);
            else panel[k / 2 * bytes + at / 2] |= (from[r * in + k] & 15) << at % 2 * 4;
        }
    }
}

static NoiseCache &noise_cache() {
    static thread_local NoiseCache cache;
    return cache;
}

// Fewer scores are looked through sooner by one thread than others wake up.
constexpr int64_t LEAST_SHARED = 1 << 16;

// Of scores [rows, num], at the temperature of each row and with the noise of its key, none where that is 0, the `most`
// likeliest, best first: ids and logprobs [rows, most].
void outrider_likeliest(const float *scores, const uint64_t *keys, const float *temperatures, int64_t rows, int64_t num,
                        int64_t most, int64_t *ids, float *logprobs, int num_threads) {
    auto noise = noise_cache().rows(keys, temperatures, rows, num, num_threads);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows * num >= LEAST_SHARED)
    for (int64_t r = 0; r < rows; r++)
        Draws(scores + r * num, noise[r], temperatures[r], num).find_likeliest(most, ids + r * most, logprobs + r * most);
}

// What is drawn of such rows: ids [rows].
void outrider_drawn(const float *scores, const uint64_t *keys, const float *temperatures, int64_t rows, int64_t num,
                    int64_t *ids, int num_threads) {
    auto noise = noise_cache().rows(keys, temperatures, rows, num, num_threads);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows * num >= LEAST_SHARED)
    for (int64_t r = 0; r < rows; r++) ids[r] = Draws(scores + r * num, noise[r], temperatures[r], num).draw();
}

// What is drawn of rows none of which is greedy by those numbers, in [0, 1), without noise: ids [rows].
void outrider_drawn_unseeded(const float *scores, const float *temperatures, const double *uniforms, int64_t rows,
                             int64_t num, int64_t *ids, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows * num >= LEAST_SHARED)
    for (int64_t r = 0; r < rows; r++)
        ids[r] = Draws(scores + r * num, nullptr, temperatures[r], num).draw_by(uniforms[r]);
}

// x [rows, in] to out [rows, out], both in bf16.
void outrider_linear(const Matrix *matrix, const bf16 *x, int64_t rows, bf16 *out, int num_threads) {
    static thread_local std::vector<Input> memory;
    grow(memory, Inputs::size(rows, matrix->in));
    Inputs inputs(memory.data(), matrix->in);
    std::vector<Taken> taken(num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        Team team(taken);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            Input *to = inputs.row(r);
            copy_rounded(to, x + r * matrix->in, matrix->in);
            if (matrix->in % 2) to[matrix->in] = 0;
        }
        linear(team, *matrix, inputs, rows, nullptr, [&](int64_t row, int64_t column, int64_t n, const float *values) {
            copy_rounded(out + row * matrix->out + column, values, n);
        });
    }
}

}  // extern "C"

// Tensors [tokens, heads, dim] of the pool's type; strides in numbers, the last one 1.
struct Heads {
    const void *data;
    int64_t token_stride, head_stride;
};

template <class T>
static void attend_tensors(const Attention &how, const Pool &pool, int layer, const Batch &batch, Heads query, Heads key,
                           Heads value, T *out, int num_threads) {
    static thread_local std::vector<float> partial;
    Plan plan(pool, batch, how.num_heads, how.window, num_threads);
    grow(partial, plan.partial_size);
    std::vector<float> &kept = partial;
    auto at = [](Heads x, int64_t token, int64_t head) {
        return static_cast<const T *>(x.data) + token * x.token_stride + head * x.head_stride;
    };
    std::vector<Taken> taken(num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        Team team(taken);
#pragma omp for schedule(static)
        for (int64_t s = 0; s < batch.num_sequences; s++)
            for (int64_t i = 0; i < batch.lengths[s]; i++)
                for (int h = 0; h < pool.num_kv_heads; h++)
                    for (int is_value = 0; is_value < 2; is_value++)
                        write_kv<T>(pool, layer, batch.tables + batch.first_blocks[s], batch.starts[s] + i, h, is_value,
                                    at(is_value ? value : key, batch.first_tokens[s] + i, h));
        attend<T>(
            team, how, pool, layer, batch, plan, kept,
            [&](int64_t token, int64_t head) { return at(query, token, head); },
            [&](int64_t token, int64_t head, const float *values) {
                copy_rounded(out + (token * how.num_heads + head) * pool.value_dim, values, pool.value_dim);
            });
    }
}

template <class T>
static void run_decoder(const Decoder &model, const Pool &pool, const Batch &batch, const int64_t *tokens,
                        const int64_t *rows, int64_t num_rows, float *logits, const Captures &captures,
                        int num_threads) {
    static thread_local Activations kept;
    Activations &a = kept;
    int64_t num_tokens = batch.num_tokens, widest = 0;
    std::map<int, std::unique_ptr<Plan>> plans;  // by window
    for (int i = 0; i < model.num_layers; i++) {
        const Attention &how = model.layers[i].attention;
        std::unique_ptr<Plan> &plan = plans[how.window];
        if (!plan) plan = std::make_unique<Plan>(pool, batch, how.num_heads, how.window, num_threads);
        widest = plan->partial_size > widest ? plan->partial_size : widest;
    }
    int64_t attended = int64_t(model.num_heads) * model.head_dim;
    grow(a.partial, widest);
    grow(a.stream, num_tokens * model.hidden);
    grow(a.out, num_tokens * model.hidden);
    grow(a.qkv, num_tokens * (model.num_heads + 2 * pool.num_kv_heads) * model.head_dim);
    grow(a.input, Inputs::size(num_tokens > num_rows ? num_tokens : num_rows, model.hidden));
    grow(a.wide_input, Inputs::size(num_tokens, model.mlp > attended ? model.mlp : attended));
    grow(a.sequence_of, num_tokens);
    for (int64_t s = 0; s < batch.num_sequences; s++)
        for (int64_t i = 0; i < batch.lengths[s]; i++) a.sequence_of[batch.first_tokens[s] + i] = s;
    std::vector<Taken> taken(num_threads);
#pragma omp parallel num_threads(num_threads)
    {
        Team team(taken);
        embed(model, tokens, num_tokens, a.stream.data());
        for (int i = 0; i < model.num_layers; i++) {
            capture(model, captures, i, num_tokens, a.stream.data());
            run_layer<T>(team, model, i, pool, batch, *plans.at(model.layers[i].attention.window), a);
        }
        capture(model, captures, model.num_layers, num_tokens, a.stream.data());
        Inputs input(a.input.data(), model.hidden);
        normalise_rows(a.stream.data(), model.final_norm, model.hidden, model.norm_eps, num_rows, rows, input);
        float cap = model.logit_softcap;
        linear(team, model.head, input, num_rows, nullptr, [&](int64_t row, int64_t column, int64_t n, float *values) {
            if (cap != 0)
                for (int i = 0; i < PANEL; i += LANES) store(values + i, tanh(load(values + i) / cap) * cap);
            __builtin_memcpy(logits + row * model.head.out + column, values, n * sizeof(float));
        });
    }
}

extern "C" {

// Writes a layer's keys and values [tokens, num_kv_heads, dim] to their places, and attends: out [tokens, num_heads,
// value_dim], all of the pool's type.
void outrider_attend(const Attention *how, const Pool *pool, int layer, const Batch *batch, const Heads *query,
                     const Heads *key, const Heads *value, void *out, int num_threads) {
    if (pool->is_bf16)
        attend_tensors(*how, *pool, layer, *batch, *query, *key, *value, static_cast<bf16 *>(out), num_threads);
    else
        attend_tensors(*how, *pool, layer, *batch, *query, *key, *value, static_cast<float *>(out), num_threads);
}

// One step: `tokens` [T] to logits [num_rows, vocabulary] of the packed tokens `rows`, in floats.
void outrider_forward(const Decoder *model, const Pool *pool, const Batch *batch, const int64_t *tokens,
                      const int64_t *rows, int64_t num_rows, float *logits, const Captures *captures, int num_threads) {
    run_decoder<bf16>(*model, *pool, *batch, tokens, rows, num_rows, logits, *captures, num_threads);
}

}  // extern "C"
