// Attention over the paged pool itself: nothing is gathered or padded, so that a sequence costs what its own context
// does. Keys and values are widened to float tile by tile; softmax goes along with a running maximum (Milakov and
// Gimelshein 2018, as in FlashAttention). A context is taken in chunks that begin at fixed positions and are merged in
// order, whoever computes them: a query's result is the same to the bit whatever it is computed beside.
#pragma once

#include <atomic>
#include <vector>

#include "simd.h"

// Positions of a tile, of a chunk, and the rows (queries times the heads that share a KV head) that a task should have.
constexpr int TILE = 64;
constexpr int64_t CHUNK = 512;
constexpr int64_t TASK_ROWS = 48;
// With fewer tasks than this to a thread, the chunks of a context become tasks of their own.
constexpr int64_t TASKS_PER_THREAD = 4;

// Where one layer's keys and values are: element strides from block to block, from keys to values, from position to
// position and from head to head.
struct Pool {
    void *data;
    int32_t is_bf16;
    int32_t block_size, num_kv_heads, key_dim, value_dim;
    int64_t block_stride, value_offset, position_stride, head_stride, layer_stride;
};

// A step's sequences: `lengths` new tokens each from position `starts` on, packed one after another from
// `first_tokens` on; the blocks of sequence i begin at `tables[first_blocks[i]]`.
struct Batch {
    int64_t num_sequences, num_tokens;
    const int64_t *starts, *lengths, *first_tokens, *first_blocks, *tables;
};

// How one layer attends. `window` 0: all; `softcap` 0: none; `sinks` [num_heads] or null.
struct Attention {
    int32_t num_heads, window;
    float scale, softcap;
    const float *sinks;
};

// c[r][0, width) += a[r][0, depth) * b[0, depth)[0, width), for R rows; width counts vectors, 1 or 2 at a time.
template <int R, int W>
static inline void accumulate(const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *c,
                              int64_t c_stride, int64_t depth) {
    Floats sums[R][W];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int w = 0; w < W; w++) sums[r][w] = load(c + r * c_stride + w * LANES);
    for (int64_t k = 0; k < depth; k++) {
        Floats row[W];
#pragma GCC unroll 16
        for (int w = 0; w < W; w++) row[w] = load(b + k * b_stride + w * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int w = 0; w < W; w++) sums[r][w] += a[r * a_stride + k] * row[w];
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int w = 0; w < W; w++) store(c + r * c_stride + w * LANES, sums[r][w]);
}

template <int W>
static inline void accumulate_rows(int rows, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                                   float *c, int64_t c_stride, int64_t depth) {
    for (; rows >= 4; rows -= 4, a += 4 * a_stride, c += 4 * c_stride)
        accumulate<4, W>(a, a_stride, b, b_stride, c, c_stride, depth);
    if (rows & 2) accumulate<2, W>(a, a_stride, b, b_stride, c, c_stride, depth), a += 2 * a_stride, c += 2 * c_stride;
    if (rows & 1) accumulate<1, W>(a, a_stride, b, b_stride, c, c_stride, depth);
}

// As above for any number of rows; `width` numbers, a multiple of LANES.
static inline void accumulate_all(int rows, const float *a, int64_t a_stride, const float *b, int64_t b_stride,
                                  float *c, int64_t c_stride, int64_t depth, int width) {
    int w = 0;
    for (; w + 2 * LANES <= width; w += 2 * LANES)
        accumulate_rows<2>(rows, a, a_stride, b + w, b_stride, c + w, c_stride, depth);
    if (w < width) accumulate_rows<1>(rows, a, a_stride, b + w, b_stride, c + w, c_stride, depth);
}

template <class T> static inline void grow(std::vector<T> &memory, int64_t size) {
    if (int64_t(memory.size()) < size) memory.resize(size);
}

static inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

static inline __m256 load8(const float *from) { return _mm256_loadu_ps(from); }

static inline __m256 load8(const bf16 *from) {
    __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

// 8 positions' keys, `stride` apart, to columns: to[d * TILE + 0..7].
template <class T> static inline void turn8(const T *keys, int64_t stride, int dim, float *to) {
    int d = 0;
    for (; d + 8 <= dim; d += 8) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; i++) a[i] = load8(keys + i * stride + d);
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int j = 0; j < 2; j++) {
                a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0x44);
                a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0xee);
            }
        for (int i = 0; i < 4; i++) {
            _mm256_storeu_ps(to + (d + i) * TILE, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
            _mm256_storeu_ps(to + (d + 4 + i) * TILE, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
        }
    }
    for (; d < dim; d++)
        for (int i = 0; i < 8; i++) to[d * TILE + i] = to_float(keys[i * stride + d]);
}

// What some rows have seen so far: the largest score, the sum of e^(score - largest), and the values weighted so.
struct Seen {
    float *largest, *total, *values;  // [rows], [rows], [rows, width]

    Seen(float *memory, int64_t rows) : largest(memory), total(memory + rows), values(memory + 2 * rows) {}
    static int64_t size(int64_t rows, int width) { return rows * (width + 2); }
};

// The queries from `first_query` to `last_query` - 1 of a sequence, for the heads that share `kv_head`, over some
// chunks of the context.
struct Task {
    int64_t sequence, first_query, last_query, kv_head, first_chunk, last_chunk;
    int64_t whole;  // index of the `Split` it is a part of; -1: it is none
};

// A task whose chunks are tasks of their own: who ends last merges what they saw, kept from `memory` on.
struct Split {
    int64_t first_task, num_tasks, memory;
    std::atomic<int64_t> num_left;

    Split(int64_t first_task, int64_t num_tasks, int64_t memory)
        : first_task(first_task), num_tasks(num_tasks), memory(memory), num_left(num_tasks) {}
    Split(const Split &other) : Split(other.first_task, other.num_tasks, other.memory) {}
};

// Memory of one thread, kept from call to call.
struct TileMemory {
    std::vector<float> queries, keys, values, scores, seen, chunk;

    static TileMemory &of_thread(int64_t rows, int key_dim, int width) {
        static thread_local TileMemory memory;
        grow(memory.queries, rows * key_dim);
        grow(memory.keys, int64_t(key_dim) * TILE);
        grow(memory.values, int64_t(TILE) * width);
        grow(memory.scores, rows * TILE);
        grow(memory.seen, Seen::size(rows, width));
        grow(memory.chunk, Seen::size(rows, width));
        return memory;
    }
};

static inline void begin(Seen seen, int rows, int width) {
    for (int r = 0; r < rows; r++) seen.largest[r] = -INFINITE, seen.total[r] = 0;
    for (int i = 0; i < rows * width; i++) seen.values[i] = 0;
}

// Adds what was seen in a later chunk.
static inline void merge(Seen into, Seen later, int rows, int width) {
    for (int r = 0; r < rows; r++) {
        float both = later.largest[r] > into.largest[r] ? later.largest[r] : into.largest[r];
        if (both == -INFINITE) continue;
        float old = exp(broadcast(into.largest[r] - both))[0], fresh = exp(broadcast(later.largest[r] - both))[0];
        if (into.largest[r] == -INFINITE) old = 0;
        if (later.largest[r] == -INFINITE) fresh = 0;
        into.largest[r] = both;
        into.total[r] = into.total[r] * old + later.total[r] * fresh;
        for (int w = 0; w < width; w += LANES) {
            float *place = into.values + r * width + w;
            store(place, load(place) * old + load(later.values + r * width + w) * fresh);
        }
    }
}

template <class T>
static inline const T *key_at(const Pool &pool, const T *layer, const int64_t *table, int64_t position, int64_t head) {
    return layer + table[position / pool.block_size] * pool.block_stride +
           position % pool.block_size * pool.position_stride + head * pool.head_stride;
}

// Asks memory for the keys and values of 8 positions, the first of them `at`.
template <class T> static inline void fetch8(const Pool &pool, const T *at) {
    constexpr int LINE = 64 / sizeof(T);
    for (int i = 0; i < 8; i++, at += pool.position_stride)
        for (int d = 0; d < pool.key_dim; d += LINE) {
            _mm_prefetch(at + d, _MM_HINT_T0);
            _mm_prefetch(at + pool.value_offset + d, _MM_HINT_T0);
        }
}

// Keys (turned) and values of positions `first` to `first + count - 1`, of which the first is one of a tile's.
// `last_position`: the last that will be asked for, as those of the next tile are fetched along with these.
template <class T>
static void load_tile(const Pool &pool, const T *layer, const int64_t *table, int64_t kv_head, int64_t first, int count,
                      int64_t last_position, TileMemory &memory, int width) {
    for (int i = 0; i < count; i += 8) {
        const T *at = key_at(pool, layer, table, first + i, kv_head);
        if (first + i + TILE <= last_position) fetch8(pool, key_at(pool, layer, table, first + i + TILE, kv_head));
        turn8(at, pool.position_stride, pool.key_dim, memory.keys.data() + i);
        for (int j = 0; j < 8 && i + j < count; j++) {
            const T *value = at + pool.value_offset + j * pool.position_stride;
            float *to = memory.values.data() + (i + j) * width;
            int d = 0;
            for (; d + LANES <= pool.value_dim; d += LANES) store(to + d, load(value + d));
            for (; d < width; d++) to[d] = d < pool.value_dim ? to_float(value[d]) : 0.0f;
        }
    }
}

// Takes one tile's positions into what the rows have seen. Row r is query r / fold.
static void take_tile(const Attention &how, const Pool &pool, int rows, int fold, int64_t first_position, int64_t first,
                      int count, TileMemory &memory, Seen seen, int width) {
    float *scores = memory.scores.data();
    for (int i = 0; i < rows * TILE; i++) scores[i] = 0;
    accumulate_all(rows, memory.queries.data(), pool.key_dim, memory.keys.data(), TILE, scores, TILE, pool.key_dim,
                   round_up(count, LANES));
    for (int r = 0; r < rows; r++) {
        float *row = scores + r * TILE;
        int64_t position = first_position + r / fold;
        // Of the tile, this row sees columns [from, to).
        int64_t to = position - first + 1, from = how.window ? position - how.window + 1 - first : 0;
        to = to > count ? count : to < 0 ? 0 : to;
        from = from < 0 ? 0 : from > to ? to : from;
        Floats highest = broadcast(-INFINITE);
        for (int c = 0; c < count; c += LANES) {
            Floats score = load(row + c) * how.scale;
            if (how.softcap != 0) score = tanh(score / how.softcap) * how.softcap;
            if (c < from || c + LANES > to)
                for (int i = 0; i < LANES; i++)
                    if (c + i < from || c + i >= to) score[i] = -INFINITE;
            store(row + c, score);
            highest = max(score, highest);
        }
        float old = seen.largest[r], now = largest(highest);
        now = now > old ? now : old;
        if (now == -INFINITE) now = 0;  // it has seen nothing yet
        float shrink = old == -INFINITE ? 0.0f : exp(broadcast(old - now))[0];
        Floats total{};
        for (int c = 0; c < count; c += LANES) {
            Floats score = load(row + c);
            Floats weight = score == -INFINITE ? Floats{} : exp(score - now);
            store(row + c, weight);
            total += weight;
        }
        if (from == to) continue;
        seen.largest[r] = now;
        seen.total[r] = seen.total[r] * shrink + sum(total);
        if (shrink != 1.0f)
            for (int w = 0; w < width; w += LANES) store(seen.values + r * width + w, load(seen.values + r * width + w) * shrink);
    }
    accumulate_all(rows, scores, TILE, memory.values.data(), width, seen.values, width, count, width);
}

// All of a task's chunks into `seen`.
template <class T>
static void attend_chunks(const Attention &how, const Pool &pool, const T *layer, const Batch &batch, const Task &task,
                          int rows, int fold, TileMemory &memory, Seen seen, int width) {
    int64_t first_position = batch.starts[task.sequence] + task.first_query;
    int64_t last_position = batch.starts[task.sequence] + task.last_query - 1;
    int64_t reached = how.window && first_position >= how.window ? first_position - how.window + 1 : 0;
    const int64_t *table = batch.tables + batch.first_blocks[task.sequence];
    begin(seen, rows, width);
    for (int64_t chunk = task.first_chunk; chunk < task.last_chunk; chunk++) {
        Seen fresh(memory.chunk.data(), rows);
        begin(fresh, rows, width);
        for (int64_t first = chunk * CHUNK; first < (chunk + 1) * CHUNK && first <= last_position; first += TILE) {
            if (first + TILE <= reached) continue;
            int count = int(last_position + 1 - first < TILE ? last_position + 1 - first : TILE);
            load_tile(pool, layer, table, task.kv_head, first, count, last_position, memory, width);
            take_tile(how, pool, rows, fold, first_position, first, count, memory, fresh, width);
        }
        merge(seen, fresh, rows, width);
    }
}

// How a step's attention is shared out. Made once a step and kept for its layers, by window.
struct Plan {
    std::vector<Task> tasks;
    std::vector<Split> splits;
    int64_t most_rows = 0, partial_size = 0;

    Plan(const Pool &pool, const Batch &batch, int num_heads, int window, int64_t num_threads) {
        int64_t fold = num_heads / pool.num_kv_heads;
        int64_t queries = TASK_ROWS > fold ? TASK_ROWS / fold : 1;
        int width = round_up(pool.value_dim, LANES);
        std::vector<Task> whole;
        for (int64_t s = 0; s < batch.num_sequences; s++)
            for (int64_t q = 0; q < batch.lengths[s]; q += queries)
                for (int64_t h = 0; h < pool.num_kv_heads; h++) {
                    int64_t last = q + queries < batch.lengths[s] ? q + queries : batch.lengths[s];
                    int64_t first_seen = window ? batch.starts[s] + q - window + 1 : 0;
                    first_seen = first_seen > 0 ? first_seen : 0;
                    int64_t chunks = (batch.starts[s] + last - 1) / CHUNK + 1;
                    whole.push_back({s, q, last, h, first_seen / CHUNK, chunks, -1});
                    most_rows = (last - q) * fold > most_rows ? (last - q) * fold : most_rows;
                }
        bool splits_up = int64_t(whole.size()) < num_threads * TASKS_PER_THREAD;
        for (const Task &task : whole) {
            int64_t n = task.last_chunk - task.first_chunk;
            if (!splits_up || n == 1) {
                tasks.push_back(task);
                continue;
            }
            splits.emplace_back(int64_t(tasks.size()), n, partial_size);
            partial_size += n * Seen::size((task.last_query - task.first_query) * fold, width);
            for (int64_t c = task.first_chunk; c < task.last_chunk; c++) {
                tasks.push_back(task);
                tasks.back().first_chunk = c, tasks.back().last_chunk = c + 1;
                tasks.back().whole = int64_t(splits.size()) - 1;
            }
        }
    }
};

// Not-a-numbers become 0, as blocks are reused, and so do infinities.
static inline float finite(float x) { return x - x == 0 ? x : 0.0f; }

static inline void store_rounded(bf16 *to, float x) { *to = to_bf16(x); }
static inline void store_rounded(float *to, float x) { *to = x; }

// Writes one token's key or value of one head into the pool.
template <class T, class From>
static inline void write_kv(const Pool &pool, int layer, const int64_t *table, int64_t position, int head, bool is_value,
                            const From *from) {
    T *to = static_cast<T *>(pool.data) + layer * pool.layer_stride +
            table[position / pool.block_size] * pool.block_stride + position % pool.block_size * pool.position_stride +
            head * pool.head_stride + (is_value ? pool.value_offset : 0);
    int n = is_value ? pool.value_dim : pool.key_dim;
    for (int d = 0; d < n; d++) store_rounded(to + d, finite(to_float(from[d])));
}

// Called by every thread of a team, after the layer's keys and values were written. `query(token, head)` points to
// key_dim floats or bf16s, `finish(token, head, values)` gets value_dim numbers. Returns when all are done.
template <class T, class Query, class Finish>
static void attend(const Attention &how, const Pool &pool, int layer, const Batch &batch, Plan &plan,
                   std::vector<float> &partial, Query query, Finish finish) {
    int fold = how.num_heads / pool.num_kv_heads, width = round_up(pool.value_dim, LANES);
    const T *data = static_cast<const T *>(pool.data) + layer * pool.layer_stride;
    TileMemory &memory = TileMemory::of_thread(plan.most_rows, pool.key_dim, width);
#pragma omp for schedule(dynamic)
    for (size_t i = 0; i < plan.tasks.size(); i++) {
        const Task &task = plan.tasks[i];
        int rows = int(task.last_query - task.first_query) * fold;
        int64_t first_token = batch.first_tokens[task.sequence] + task.first_query;
        for (int r = 0; r < rows; r++) {
            auto *from = query(first_token + r / fold, task.kv_head * fold + r % fold);
            for (int d = 0; d < pool.key_dim; d++) memory.queries[r * pool.key_dim + d] = to_float(from[d]);
        }
        Seen seen(memory.seen.data(), rows);
        if (task.whole >= 0) {
            Split &split = plan.splits[task.whole];
            int64_t size = Seen::size(rows, width);
            float *kept = partial.data() + split.memory;
            Seen own(kept + (int64_t(i) - split.first_task) * size, rows);
            attend_chunks(how, pool, data, batch, task, rows, fold, memory, own, width);
            if (split.num_left.fetch_sub(1) > 1) continue;
            split.num_left = split.num_tasks;  // for the next layer
            begin(seen, rows, width);
            for (int64_t n = 0; n < split.num_tasks; n++) merge(seen, Seen(kept + n * size, rows), rows, width);
        } else {
            attend_chunks(how, pool, data, batch, task, rows, fold, memory, seen, width);
        }
        for (int r = 0; r < rows; r++) {
            int64_t head = task.kv_head * fold + r % fold;
            float total = seen.total[r];
            if (how.sinks) total += exp(broadcast(how.sinks[head] - seen.largest[r]))[0];
            float *values = seen.values + r * width, share = 1.0f / total;
            for (int d = 0; d < width; d += LANES) store(values + d, load(values + d) * share);
            finish(first_token + r / fold, head, values);
        }
    }
}
