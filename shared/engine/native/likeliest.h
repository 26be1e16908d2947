// The likeliest few of many tokens, and as how likely a softmax sees them.
#pragma once

#include <cmath>

#include "simd.h"

// Whether any of a vector's numbers is larger; those that are none are not.
static inline bool any_larger(Floats x, float than) {
#if defined(__AVX512BF16__)
    return _mm512_cmp_ps_mask(__m512(x), _mm512_set1_ps(than), _CMP_GT_OQ);
#else
    return _mm256_movemask_ps(_mm256_cmp_ps(__m256(x), _mm256_set1_ps(than), _CMP_GT_OQ));
#endif
}

// Of one row of `num` scores, the `most` largest, best first and of equals the first, to `ids` and, as logarithms of
// their shares of the whole softmax, to `logprobs`. Where fewer are finite, the rest have id 0 and -inf.
static inline void likeliest_of_row(const float *scores, int64_t num, int64_t most, int64_t *ids, float *logprobs) {
    for (int64_t i = 0; i < most; i++) ids[i] = 0, logprobs[i] = -INFINITE;
    auto take = [&](int64_t id) {
        float score = scores[id];
        if (!(score > logprobs[most - 1])) return;
        int64_t place = most - 1;
        for (; place > 0 && score > logprobs[place - 1]; place--)
            ids[place] = ids[place - 1], logprobs[place] = logprobs[place - 1];
        ids[place] = id, logprobs[place] = score;
    };
    int64_t whole = num / LANES * LANES;
    for (int64_t t = 0; t < whole; t += LANES)
        if (any_larger(load(scores + t), logprobs[most - 1]))
            for (int64_t i = 0; i < LANES; i++) take(t + i);
    for (int64_t t = whole; t < num; t++) take(t);

    // What is far below counts for nothing, not for the smallest number there is.
    float best = logprobs[0];
    auto weight = [&](Floats x) { return x < -87.0f ? Floats{} : exp(x); };
    Floats total{};
    for (int64_t t = 0; t < whole; t += LANES) total += weight(load(scores + t) - best);
    float sum_of_all = sum(total);
    for (int64_t t = whole; t < num; t++) sum_of_all += weight(broadcast(scores[t] - best))[0];
    float of_all = std::log(sum_of_all);
    for (int64_t i = 0; i < most; i++)
        if (logprobs[i] > -INFINITE) logprobs[i] = logprobs[i] - best - of_all;
}

// Called by every thread of a team. `scores` [rows, num], `ids` and `logprobs` [rows, most].
static inline void likeliest(const float *scores, int64_t rows, int64_t num, int64_t most, int64_t *ids,
                             float *logprobs) {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        likeliest_of_row(scores + r * num, num, most, ids + r * most, logprobs + r * most);
}
