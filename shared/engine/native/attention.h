// Attention over the paged pool itself: nothing is gathered or padded, so that a sequence costs what its own context
// does. Tile by tile, keys and values are laid out as panels, and both products are those of panels. A context is taken
// in chunks that begin at fixed positions and are merged in order by their maxima (Milakov and Gimelshein 2018, as in
// FlashAttention), whoever computes them: a query's result is the same to the bit whatever it is computed beside.
#pragma once

#include <atomic>
#include <vector>

#include "team.h"
#include "tiles.h"

// Positions of a tile, of a chunk, and the rows (queries times heads) that a task should have.
constexpr int TILE = PANEL;
constexpr int64_t CHUNK = 512;
constexpr int64_t TASK_ROWS = 64;
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
// `first_tokens` on; the blocks of sequence i begin at `tables[first_blocks[i]]`. Where some have token trees (else these
// are null) the tree of sequence i lies from `tree_starts[i]` on, one token behind the other, of which the first follows
// the one that lies at `parents[first_parents[i]]`, the next `parents[first_parents[i] + 1]`, and so on; packed token t
// stands at `positions[t]` of its text.
struct Batch {
    int64_t num_sequences, num_tokens;
    const int64_t *starts, *lengths, *first_tokens, *first_blocks, *tables;
    const int64_t *positions, *tree_starts, *first_parents, *parents;

    // Where a token's key and value lie: at its position, but in trees.
    int64_t slot(int64_t sequence, int64_t token) const { return starts[sequence] + token - first_tokens[sequence]; }
    int64_t position(int64_t sequence, int64_t token) const { return positions ? positions[token] : slot(sequence, token); }
    int64_t tree_start(int64_t sequence) const { return tree_starts ? tree_starts[sequence] : INT64_MAX; }
    int64_t parent(int64_t sequence, int64_t slot) const {
        return parents[first_parents[sequence] + slot - tree_starts[sequence]];
    }
};

// How one layer attends. `window` 0: all; `softcap` 0: none; `sinks` [num_heads] or null.
struct Attention {
    int32_t num_heads, window;
    float scale, softcap;
    const float *sinks;
};

template <class T> static inline void grow(std::vector<T> &memory, int64_t size) {
    if (int64_t(memory.size()) < size) memory.resize(size);
}

static inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// A unit of a panel, 4 bytes, from inputs side by side: keys along their own numbers, values along positions.
static inline uint32_t unit_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}
static inline uint32_t unit_of(bf16 first, bf16 second) { return first | uint32_t(second) << 16; }

// 8 positions' keys, `stride` apart, to columns of a panel: to[u * PANEL + 0..7] are their units u.
template <class T> static inline void turn8(const T *keys, int64_t stride, int dim, uint32_t *to) {
    int u = 0;
    for (; (u + 8) * UNIT<T> <= dim; u += 8) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(reinterpret_cast<const float *>(keys + i * stride + u * UNIT<T>));
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int j = 0; j < 2; j++) {
                a[i + 2 * j] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0x44);
                a[i + 2 * j + 1] = _mm256_shuffle_ps(b[i + j], b[i + 2 + j], 0xee);
            }
        float *columns = reinterpret_cast<float *>(to + u * PANEL);
        for (int i = 0; i < 4; i++) {
            _mm256_storeu_ps(columns + i * PANEL, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
            _mm256_storeu_ps(columns + (4 + i) * PANEL, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
        }
    }
    for (; u * UNIT<T> < dim; u++)
        for (int i = 0; i < 8; i++) {
            const T *at = keys + i * stride + u * UNIT<T>;
            if constexpr (UNIT<T> == 1) to[u * PANEL + i] = unit_of(*at);
            else to[u * PANEL + i] = unit_of(at[0], (u + 1) * UNIT<T> <= dim ? at[1] : 0);
        }
}

// One position's key to a column of a panel, and its value to its share of the units of all panels.
template <class T> static inline void turn1(const T *key, int dim, uint32_t *to) {
    for (int u = 0; u * UNIT<T> < dim; u++) {
        const T *at = key + u * UNIT<T>;
        if constexpr (UNIT<T> == 1) to[u * PANEL] = unit_of(*at);
        else to[u * PANEL] = unit_of(at[0], (u + 1) * UNIT<T> <= dim ? at[1] : 0);
    }
}
template <class T> static inline void take_value(const T *value, int dim, int share, uint32_t *to, int64_t panel) {
    for (int d = 0; d < dim; d += PANEL, to += panel) {
        int n = dim - d < PANEL ? dim - d : PANEL;
        if constexpr (UNIT<T> == 1) __builtin_memcpy(to, value + d, n * sizeof(T));
        else if (share) for (int i = 0; i < n; i++) to[i] = unit_of(bf16(to[i]), value[d + i]);
        else for (int i = 0; i < n; i++) to[i] = unit_of(value[d + i], bf16(to[i] >> 16));
    }
}

// What some rows have seen so far: the largest score, the sum of e^(score - largest), and the values weighted so.
struct Seen {
    float *largest, *total, *values;  // [rows], [rows], [rows, width]

    Seen(float *memory, int64_t rows) : largest(memory), total(memory + rows), values(memory + 2 * rows) {}
    static int64_t size(int64_t rows, int width) { return rows * (width + 2); }
};

// The queries from `first_query` to `last_query` - 1 of a sequence, for the heads that share some KV heads, over some
// chunks of the context. Its rows are those of the first KV head, query by query, then those of the next.
struct Task {
    int64_t sequence, first_query, last_query, first_head, last_head, first_chunk, last_chunk;
    int64_t whole;  // index of the `Split` it is a part of; -1: it is none

    int rows_each(int fold) const { return int(last_query - first_query) * fold; }
    int rows(int fold) const { return rows_each(fold) * int(last_head - first_head); }
};

// The first and the last position in their text of queries `first_query` to `last_query` - 1 of a sequence.
struct Reach {
    int64_t first, last;

    Reach(const Batch &batch, int64_t sequence, int64_t first_query, int64_t last_query) {
        int64_t token = batch.first_tokens[sequence];
        first = batch.position(sequence, token + first_query), last = batch.position(sequence, token + last_query - 1);
        if (last < batch.tree_start(sequence)) return;
        for (int64_t q = first_query; q < last_query; q++) {
            int64_t position = batch.position(sequence, token + q);
            first = position < first ? position : first, last = position > last ? position : last;
        }
    }
};

// A task whose chunks are tasks of their own: who ends last merges what they saw, kept from `memory` on.
struct Split {
    int64_t first_task, num_tasks, memory;
    std::atomic<int64_t> num_left;

    Split(int64_t first_task, int64_t num_tasks, int64_t memory)
        : first_task(first_task), num_tasks(num_tasks), memory(memory), num_left(num_tasks) {}
    Split(const Split &other) : Split(other.first_task, other.num_tasks, other.memory) {}
};

// What multiplies rows by panels of this type.
template <class T> using MultiplierOf = std::conditional_t<std::is_same_v<T, bf16>, Multiplier, Registers>;

// Memory of one thread, kept from call to call. Of a tile, its keys are one panel, its values panels of 32 numbers each.
template <class T> struct TileMemory {
    using Row = typename Multiplied<T>::Type;
    std::vector<Row> queries, weights;
    std::vector<uint32_t> keys, values;
    std::vector<float> scores, seen, chunk;
    int64_t query_stride = 0;

    static constexpr int64_t VALUE_PANEL = TILE / UNIT<T> * PANEL;
    static constexpr int64_t SCORE_STRIDE = CHUNK + 16, WEIGHT_STRIDE = CHUNK + 64 / sizeof(Row);

    static TileMemory &of_thread(int64_t rows, int key_dim, int width) {
        static thread_local TileMemory memory;
        memory.query_stride = row_stride<Row>(key_dim);
        grow(memory.queries, rows * memory.query_stride);
        grow(memory.weights, rows * WEIGHT_STRIDE);
        grow(memory.keys, num_units<T>(key_dim) * PANEL);
        grow(memory.values, width / PANEL * VALUE_PANEL);
        grow(memory.scores, rows * SCORE_STRIDE);
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

// Positions `first` to `last` of a sequence, whose blocks are `table`.
struct Stretch {
    const int64_t *table;
    int64_t first, last;
};

// Keys or values of some KV heads that will be looked at next.
struct Next {
    Stretch stretch;
    int64_t first_head, last_head;
    bool values;
};

// Asks memory for one of `parts` parts of their first tile, to be in the second cache: in the first, heads drive one
// another out. A position's heads lie side by side. `parts`: a multiple of the stretches of 8 positions, which each lie
// in one block.
template <class T> ALWAYS_INLINE void fetch(const Pool &pool, const T *layer, const Next &next, int64_t part, int64_t parts) {
    int64_t first = next.stretch.first + TILE * part / parts, last = next.stretch.first + TILE * (part + 1) / parts;
    last = last <= next.stretch.last ? last : next.stretch.last + 1;
    if (first >= last) return;
    const T *at = key_at(pool, layer, next.stretch.table, first, next.first_head) + (next.values ? pool.value_offset : 0);
    constexpr int LINE = 64 / sizeof(T);
    int64_t width = (next.last_head - next.first_head - 1) * pool.head_stride + pool.key_dim;
    for (; first < last; first++, at += pool.position_stride)
        for (int64_t d = 0; d < width; d += LINE) _mm_prefetch(at + d, _MM_HINT_T1);
}

// One unit of values, of as many positions as that has, to its row in every panel of `width` numbers.
static inline void take_values(const bf16 *first, const bf16 *second, int dim, int width, uint32_t *to, int64_t panel) {
#if defined(__AVX512BF16__)
    // Of two positions, their numbers 0 to 15, pair by pair, and 16 to 31.
    const __m512i FRONT = _mm512_set_epi32(0x2f000f, 0x2e000e, 0x2d000d, 0x2c000c, 0x2b000b, 0x2a000a, 0x290009, 0x280008,
                                           0x270007, 0x260006, 0x250005, 0x240004, 0x230003, 0x220002, 0x210001, 0x200000);
    const __m512i BACK = _mm512_add_epi16(FRONT, _mm512_set1_epi16(16));
#endif
    for (int d = 0; d < width; d += PANEL, to += panel) {
        int n = dim - d < PANEL ? dim - d : PANEL;
#if defined(__AVX512BF16__)
        if (n == PANEL && second) {
            __m512i a = _mm512_loadu_si512(first + d), b = _mm512_loadu_si512(second + d);
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, FRONT, b));
            _mm512_storeu_si512(to + LANES, _mm512_permutex2var_epi16(a, BACK, b));
            continue;
        }
#endif
        for (int i = 0; i < n; i++) to[i] = unit_of(first[d + i], second ? second[d + i] : 0);
        for (int i = n; i < PANEL; i++) to[i] = 0;
    }
}
static inline void take_values(const float *first, const float *, int dim, int width, uint32_t *to, int64_t panel) {
    for (int d = 0; d < width; d += PANEL, to += panel) {
        int n = dim - d < PANEL ? dim - d : PANEL;
        __builtin_memcpy(to, first + d, n * sizeof(float));
        for (int i = n; i < PANEL; i++) to[i] = 0;
    }
}

// What of its sequence a task looks at, from the first position of its first tile on.
static inline Stretch stretch_of(const Attention &how, const Batch &batch, const Task &task) {
    Reach reach(batch, task.sequence, task.first_query, task.last_query);
    int64_t first = how.window && reach.first >= how.window ? (reach.first - how.window + 1) / TILE * TILE : 0;
    int64_t last = reach.last;
    return {batch.tables + batch.first_blocks[task.sequence],
            first > task.first_chunk * CHUNK ? first : task.first_chunk * CHUNK,
            last < task.last_chunk * CHUNK ? last : task.last_chunk * CHUNK - 1};
}

// What a task's rows see of a chunk, of which they look at `stretch`: tile by tile, as memory is read fastest so, and of
// a tile head by head. Row r of one head's is query r / fold of the task. `following`: what is looked at after this
// chunk's values.
template <class T>
static void attend_chunk(const Attention &how, const Pool &pool, const T *layer, const Batch &batch, const Task &task,
                         Stretch stretch, int fold, Next following, TileMemory<T> &memory, MultiplierOf<T> &multiplier,
                         Seen seen, int width) {
    using Memory = TileMemory<T>;
    constexpr int64_t MOST_ROWS = MultiplierOf<T>::MOST_ROWS;
    int rows = task.rows_each(fold);
    int64_t heads = task.last_head - task.first_head, parts = heads * (TILE / 8);
    int count = int(stretch.last + 1 - stretch.first);
    int64_t first_token = batch.first_tokens[task.sequence] + task.first_query;
    int64_t tree_start = batch.tree_start(task.sequence);
    // Calls `of(first row, end of rows)` for all of them at once; in a tile that a tree reaches into for one query after
    // another, `place(column, slot)` having put what belongs to its own line of ancestors into its columns, but for what
    // is there for the one before.
    auto by_rows = [&](int first, auto place, auto of) {
        int64_t begin = stretch.first + first, end = begin + TILE <= stretch.last ? begin + TILE : stretch.last + 1;
        if (end <= tree_start) return of(0, rows);
        int64_t placed[TILE];
        for (int i = 0; i < TILE; i++) placed[i] = begin + i;
        for (int row = 0; row < rows; row += fold) {
            int64_t token = first_token + row / fold, slot = batch.slot(task.sequence, token);
            for (int64_t at = batch.positions[token]; at >= tree_start && at >= begin; at--) {
                if (at < end && placed[at - begin] != slot) place(int(at - begin), placed[at - begin] = slot);
                slot = batch.parent(task.sequence, slot);
            }
            of(row, row + fold);
        }
    };
    auto next_of = [&](int first, bool values) -> Next {
        Stretch later{stretch.table, stretch.first + first + TILE, stretch.last};
        if (first + TILE < count) return {later, task.first_head, task.last_head, values};
        return values ? following : Next{stretch, task.first_head, task.last_head, true};
    };

    for (int first = 0; first < count; first += TILE) {
        Next next = next_of(first, false);
        for (int64_t h = 0; h < heads; h++) {
            int64_t kv_head = task.first_head + h, row_of_head = h * rows;
            for (int i = 0; i < TILE; i += 8) {
                fetch(pool, layer, next, h * (TILE / 8) + i / 8, parts);
                if (first + i < count)
                    turn8(key_at(pool, layer, stretch.table, stretch.first + first + i, kv_head), pool.position_stride,
                          pool.key_dim, memory.keys.data() + i);
            }
            auto place = [&](int column, int64_t slot) {
                turn1(key_at(pool, layer, stretch.table, slot, kv_head), pool.key_dim, memory.keys.data() + column);
            };
            by_rows(first, place, [&](int begin, int end) {
                RowBlocks blocks(end - begin, MOST_ROWS);
                multiplier.fit(blocks.longest());
                for (int64_t b = 0; b < blocks.count; b++) {
                    int64_t row = row_of_head + begin + blocks.first(b), n = blocks.first(b + 1) - blocks.first(b);
                    multiplier.template multiply<Source::CACHE>(
                        n, memory.queries.data() + row * memory.query_stride, memory.query_stride,
                        reinterpret_cast<const T *>(memory.keys.data()), num_units<T>(pool.key_dim),
                        memory.scores.data() + row * Memory::SCORE_STRIDE + first, Memory::SCORE_STRIDE);
                }
            });
        }
    }

    for (int r = 0; r < rows * heads; r++) {
        float *scores = memory.scores.data() + r * Memory::SCORE_STRIDE;
        auto *weights = memory.weights.data() + r * Memory::WEIGHT_STRIDE;
        int64_t position = batch.position(task.sequence, first_token + r % rows / fold);
        // Of the stretch, this row sees columns [from, to).
        int64_t to = position - stretch.first + 1, from = how.window ? to - how.window : 0;
        to = to > count ? count : to < 0 ? 0 : to;
        from = from < 0 ? 0 : from > to ? to : from;
        Floats highest = broadcast(-INFINITE), total{};
        for (int c = 0; c < count; c += LANES) {
            Floats score = load(scores + c) * how.scale;
            if (how.softcap != 0) score = tanh(score / how.softcap) * how.softcap;
            if (c < from || c + LANES > to)
                for (int i = 0; i < LANES; i++)
                    if (c + i < from || c + i >= to) score[i] = -INFINITE;
            store(scores + c, score);
            highest = max(score, highest);
        }
        seen.largest[r] = largest(highest);
        for (int c = 0; c < count; c += LANES) {
            Floats score = load(scores + c);
            Floats weight = score == -INFINITE ? Floats{} : exp(score - seen.largest[r]);
            store(weights + c, weight);
            total += weight;
        }
        seen.total[r] = sum(total);
    }

    for (int i = 0; i < rows * heads * width; i++) seen.values[i] = 0;
    for (int first = 0; first < count; first += TILE) {
        Next next = next_of(first, true);
        int n = count - first < TILE ? count - first : TILE;
        for (int64_t h = 0; h < heads; h++) {
            int64_t kv_head = task.first_head + h, row_of_head = h * rows;
            for (int i = 0; i < TILE; i += 8) {
                fetch(pool, layer, next, h * (TILE / 8) + i / 8, parts);
                if (i >= n) continue;
                const T *value = key_at(pool, layer, stretch.table, stretch.first + first + i, kv_head) + pool.value_offset;
                for (int j = i; j < i + 8 && j < n; j += UNIT<T>, value += UNIT<T> * pool.position_stride)
                    take_values(value, j + 1 < n ? value + pool.position_stride : nullptr, pool.value_dim, width,
                                memory.values.data() + j / UNIT<T> * PANEL, Memory::VALUE_PANEL);
            }
            auto place = [&](int column, int64_t slot) {
                take_value(key_at(pool, layer, stretch.table, slot, kv_head) + pool.value_offset, pool.value_dim,
                           column % UNIT<T>, memory.values.data() + column / UNIT<T> * PANEL, Memory::VALUE_PANEL);
            };
            by_rows(first, place, [&](int begin, int end) {
                RowBlocks blocks(end - begin, MOST_ROWS);
                multiplier.fit(blocks.longest());
                for (int64_t b = 0; b < blocks.count; b++)
                    for (int w = 0; w < width; w += PANEL) {
                        int64_t row = row_of_head + begin + blocks.first(b), num = blocks.first(b + 1) - blocks.first(b);
                        alignas(64) float tile[MOST_ROWS * PANEL];
                        multiplier.template multiply<Source::CACHE>(
                            num, memory.weights.data() + row * Memory::WEIGHT_STRIDE + first, Memory::WEIGHT_STRIDE,
                            reinterpret_cast<const T *>(memory.values.data() + w / PANEL * Memory::VALUE_PANEL),
                            num_units<T>(n), tile, PANEL);
                        for (int64_t r = 0; r < num; r++)
                            for (int i = 0; i < PANEL; i += LANES) {
                                float *place = seen.values + (row + r) * width + w + i;
                                store(place, load(place) + load(tile + r * PANEL + i));
                            }
                    }
            });
        }
    }
}

// All of a task's chunks into `seen`. `following`: what is looked at after it.
template <class T>
static void attend_chunks(const Attention &how, const Pool &pool, const T *layer, const Batch &batch, const Task &task,
                          Next following, int fold, TileMemory<T> &memory, MultiplierOf<T> &multiplier, Seen seen,
                          int width) {
    int rows = task.rows(fold);
    Stretch whole = stretch_of(how, batch, task), stretch = whole;
    begin(seen, rows, width);
    for (int64_t chunk = task.first_chunk; chunk < task.last_chunk; chunk++) {
        stretch.last = whole.last < (chunk + 1) * CHUNK ? whole.last : (chunk + 1) * CHUNK - 1;
        Seen fresh(memory.chunk.data(), rows);
        Next next = following;
        if (chunk + 1 < task.last_chunk)
            next = {{whole.table, stretch.last + 1, whole.last}, task.first_head, task.last_head, false};
        attend_chunk(how, pool, layer, batch, task, stretch, fold, next, memory, multiplier, fresh, width);
        merge(seen, fresh, rows, width);
        stretch.first = stretch.last + 1;
    }
}

// How a step's attention is shared out. Made once a step and kept for its layers, by window.
struct Plan {
    std::vector<Task> tasks;
    std::vector<Split> splits;
    int64_t most_rows = 0, partial_size = 0;

    Plan(const Pool &pool, const Batch &batch, int num_heads, int window, int64_t num_threads) {
        int64_t fold = num_heads / pool.num_kv_heads, all = pool.num_kv_heads;
        int64_t queries = TASK_ROWS > fold ? TASK_ROWS / fold : 1;
        int width = round_up(pool.value_dim, PANEL);
        std::vector<Task> whole;
        int64_t num_chunks = 0;
        for (int64_t s = 0; s < batch.num_sequences; s++)
            for (int64_t q = 0; q < batch.lengths[s]; q += queries) {
                int64_t last = q + queries < batch.lengths[s] ? q + queries : batch.lengths[s];
                Reach reach(batch, s, q, last);
                int64_t first_seen = window ? reach.first - window + 1 : 0;
                first_seen = first_seen > 0 ? first_seen : 0;
                int64_t chunks = reach.last / CHUNK + 1;
                whole.push_back({s, q, last, 0, all, first_seen / CHUNK, chunks, -1});
                num_chunks += chunks - first_seen / CHUNK;
            }
        int64_t enough = num_threads * TASKS_PER_THREAD;
        bool by_chunk = int64_t(whole.size()) < enough, by_head = by_chunk && num_chunks < enough;
        for (Task task : whole) {
            int64_t heads = by_head || task.rows(fold) > TASK_ROWS ? 1 : all;
            for (task.first_head = 0; task.first_head < all; task.first_head += heads) {
                task.last_head = task.first_head + heads;
                add(task, by_chunk, fold, width);
            }
        }
    }

private:
    void add(Task task, bool by_chunk, int64_t fold, int width) {
        most_rows = task.rows(fold) > most_rows ? task.rows(fold) : most_rows;
        int64_t n = task.last_chunk - task.first_chunk;
        if (!by_chunk || n == 1) {
            tasks.push_back(task);
            return;
        }
        splits.emplace_back(int64_t(tasks.size()), n, partial_size);
        partial_size += n * Seen::size(task.rows(fold), width);
        task.whole = int64_t(splits.size()) - 1;
        for (int64_t c = task.first_chunk, end = task.last_chunk; c < end; c++) {
            task.first_chunk = c, task.last_chunk = c + 1;
            tasks.push_back(task);
        }
    }
};

// Writes one token's key or value of one head into the pool. Not-a-numbers become 0, as blocks are reused, and so does
// what is infinite there: a number so large may be finite before it is rounded.
template <class T, class From>
static inline void write_kv(const Pool &pool, int layer, const int64_t *table, int64_t position, int head, bool is_value,
                            const From *from) {
    T *to = static_cast<T *>(pool.data) + layer * pool.layer_stride +
            table[position / pool.block_size] * pool.block_stride + position % pool.block_size * pool.position_stride +
            head * pool.head_stride + (is_value ? pool.value_offset : 0);
    int n = is_value ? pool.value_dim : pool.key_dim;
    copy_rounded(to, from, n);
    for (int d = 0; d < n; d++) to[d] = to_float(to[d]) - to_float(to[d]) == 0 ? to[d] : T(0);
}

// Called by every thread of a team, after the layer's keys and values were written. `query(token, head)` points to
// key_dim floats or bf16s, `finish(token, head, values)` gets value_dim numbers. Returns when all are done.
template <class T, class Query, class Finish>
static void attend(Team &team, const Attention &how, const Pool &pool, int layer, const Batch &batch, Plan &plan,
                   std::vector<float> &partial, Query query, Finish finish) {
    int fold = how.num_heads / pool.num_kv_heads, width = round_up(pool.value_dim, PANEL);
    const T *data = static_cast<const T *>(pool.data) + layer * pool.layer_stride;
    TileMemory<T> &memory = TileMemory<T>::of_thread(plan.most_rows, pool.key_dim, width);
    MultiplierOf<T> multiplier;
    team.share(int64_t(plan.tasks.size()), [&](int64_t i, int64_t following) {
        const Task &task = plan.tasks[i];
        int rows = task.rows(fold), each = task.rows_each(fold);
        Next next = {{nullptr, 0, -1}, 0, 0, false};
        if (following >= 0) {
            const Task &later = plan.tasks[following];
            next = {stretch_of(how, batch, later), later.first_head, later.last_head, false};
        }
        int64_t first_token = batch.first_tokens[task.sequence] + task.first_query;
        auto token_of = [&](int row) { return first_token + row % each / fold; };
        auto head_of = [&](int row) { return (task.first_head + row / each) * fold + row % fold; };
        for (int r = 0; r < rows; r++) {
            auto *from = query(token_of(r), head_of(r));
            auto *to = memory.queries.data() + r * memory.query_stride;
            copy_rounded(to, from, pool.key_dim);
            if (pool.key_dim % UNIT<T>) to[pool.key_dim] = 0;
        }
        Seen seen(memory.seen.data(), rows);
        if (task.whole >= 0) {
            Split &split = plan.splits[task.whole];
            int64_t size = Seen::size(rows, width);
            float *kept = partial.data() + split.memory;
            Seen own(kept + (i - split.first_task) * size, rows);
            attend_chunks(how, pool, data, batch, task, next, fold, memory, multiplier, own, width);
            if (split.num_left.fetch_sub(1) > 1) return;
            split.num_left = split.num_tasks;  // for the next layer
            begin(seen, rows, width);
            for (int64_t n = 0; n < split.num_tasks; n++) merge(seen, Seen(kept + n * size, rows), rows, width);
        } else {
            attend_chunks(how, pool, data, batch, task, next, fold, memory, multiplier, seen, width);
        }
        for (int r = 0; r < rows; r++) {
            float total = seen.total[r];
            if (how.sinks) total += exp(broadcast(how.sinks[head_of(r)] - seen.largest[r]))[0];
            float *values = seen.values + r * width, share = 1.0f / total;
            for (int d = 0; d < width; d += LANES) store(values + d, load(values + d) * share);
            finish(token_of(r), head_of(r), values);
        }
    });
}
