// What is drawn, and what is likely to be: see shared/sampling/coupled.py and unseeded.py.
#pragma once

#include <algorithm>
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

// What numbers weigh in a softmax, where the largest is 0. What is far below counts for nothing, not for the smallest
// number there is.
static inline Floats weight(Floats x) { return x < -87.0f ? Floats{} : exp(x); }

static inline float weight(float x) { return weight(broadcast(x))[0]; }

// The logarithm of what all of a row of `num` numbers weigh, where the largest, `best`, weighs 1; `at(t)` and `one(t)`
// are LANES of them and one.
template <class At, class One> static inline float log_of_all(int64_t num, float best, At at, One one) {
    Floats total{};
    int64_t whole = num / LANES * LANES;
    for (int64_t t = 0; t < whole; t += LANES) total += weight(at(t) - best);
    float sum_of_all = sum(total);
    for (int64_t t = whole; t < num; t++) sum_of_all += weight(one(t) - best);
    return std::log(sum_of_all);
}

// The `most` largest of such a row, best first and of equals the first, to `ids` and `values`. Where fewer are more than
// -inf, the rest have id 0 and -inf.
template <class At, class One>
static inline void largest_of_row(int64_t num, int64_t most, int64_t *ids, float *values, At at, One one) {
    for (int64_t i = 0; i < most; i++) ids[i] = 0, values[i] = -INFINITE;
    auto take = [&](int64_t id, float value) {
        if (!(value > values[most - 1])) return;
        int64_t place = most - 1;
        for (; place > 0 && value > values[place - 1]; place--)
            ids[place] = ids[place - 1], values[place] = values[place - 1];
        ids[place] = id, values[place] = value;
    };
    int64_t whole = num / LANES * LANES;
    for (int64_t t = 0; t < whole; t += LANES) {
        Floats x = at(t);
        if (any_larger(x, values[most - 1]))
            for (int64_t i = 0; i < LANES; i++) take(t + i, x[i]);
    }
    for (int64_t t = whole; t < num; t++) take(t, one(t));
}

// A row of `num` scores of which a softmax at that temperature is drawn from, with its noise; greedy ones have none, null,
// and a temperature of 0.
class Draws {
    const float *scores, *noise;
    float temperature;
    int64_t num;
    float best = 0.0f;

    Floats scaled(int64_t t) const {
        Floats x = load(scores + t) - best;
        return temperature == 1.0f ? x : x / temperature;
    }

    float one_scaled(int64_t t) const {
        float x = scores[t] - best;
        return temperature == 1.0f ? x : x / temperature;
    }

    // Summed up by parts of which each adds little to what rounding loses of it.
    static constexpr int64_t PART = 64 * LANES;

    // What the numbers from `first` on, which begins a part, weigh together, to `last`.
    double weight_of(int64_t first, int64_t last) const {
        double total = 0;
        for (int64_t part = first; part < last; part += PART) {
            int64_t end = std::min(part + PART, last), whole = part + (end - part) / LANES * LANES;
            Floats its{};
            for (int64_t t = part; t < whole; t += LANES) its += weight(scaled(t));
            total += sum(its);
            for (int64_t t = whole; t < end; t++) total += weight(one_scaled(t));
        }
        return total;
    }

  public:
    Draws(const float *scores, const float *noise, float temperature, int64_t num)
        : scores(scores), noise(noise), temperature(temperature > 0 ? temperature : 1.0f), num(num) {}

    // Where it is largest, the first of equals, by the scores; from then on these count from there.
    int64_t find_best() {
        int64_t id;
        float value;
        largest_of_row(
            num, 1, &id, &value, [&](int64_t t) { return load(scores + t); }, [&](int64_t t) { return scores[t]; });
        best = value;
        return id;
    }

    // The first that is no number; -1 where each is one.
    int64_t find_nan() const {
        auto differs = [](Floats x) { Ints at = x != x; return largest(Floats(at & 0x3F800000)) > 0.0f; };
        int64_t t = 0;
        while (t + LANES <= num && !differs(load(scores + t))) t += LANES;
        while (t < num && scores[t] == scores[t]) t++;
        return t < num ? t : -1;
    }

    // What is drawn: where logprob + noise is largest.
    int64_t draw() {
        int64_t id = find_best();
        if (!noise) {
            int64_t nan = find_nan();  // as NumPy has it, which finds those of other steps
            return nan < 0 ? id : nan;
        }
        auto at = [&](int64_t t) { return scaled(t); };
        float of_all = log_of_all(num, 0.0f, at, [&](int64_t t) { return one_scaled(t); }), value;
        largest_of_row(
            num, 1, &id, &value, [&](int64_t t) { return scaled(t) - of_all + load(noise + t); },
            [&](int64_t t) { return one_scaled(t) - of_all + noise[t]; });
        return id;
    }

    // The first with which all up to it weigh more than that share, in [0, 1), of all. Where rounding leaves none it is
    // the last that weighs anything; of what are no numbers the last of all.
    int64_t draw_by(double uniform) {
        find_best();
        double left = uniform * weight_of(0, num), rest = 0;  // to be gone beyond, in all and in the chosen part
        int64_t chosen = -1;
        for (int64_t part = 0; part < num && left >= 0; part += PART) {
            double its = weight_of(part, std::min(part + PART, num));
            if (its > 0) chosen = part, rest = left;
            left -= its;
        }
        if (chosen < 0) return num - 1;
        int64_t drawn = chosen, end = std::min(chosen + PART, num);
        // As much of what its tokens weigh apart: what rounding makes of that would all be its last token's.
        double apart = 0;
        for (int64_t t = chosen; t < end; t++) apart += weight(one_scaled(t));
        rest *= apart / weight_of(chosen, end);
        for (int64_t t = chosen; t < end && rest >= 0; t++)
            if (float its = weight(one_scaled(t)); its > 0) drawn = t, rest -= its;
        return drawn;
    }

    // The `most` likeliest by score + noise, and the logarithms of their shares of a softmax of all.
    void find_likeliest(int64_t most, int64_t *ids, float *logprobs) {
        find_best();
        auto at = [&](int64_t t) { return noise ? scaled(t) + load(noise + t) : scaled(t); };
        auto one = [&](int64_t t) { return noise ? one_scaled(t) + noise[t] : one_scaled(t); };
        largest_of_row(num, most, ids, logprobs, at, one);
        float largest = logprobs[0], of_all = log_of_all(num, largest, at, one);
        for (int64_t i = 0; i < most; i++)
            if (logprobs[i] > -INFINITE) logprobs[i] = logprobs[i] - largest - of_all;
    }
};
