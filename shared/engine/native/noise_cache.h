// Noise that is drawn by more than once.
#pragma once

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "noise.h"

// Gumbel noise of the positions that were asked for last: a drafter looks at a position in some rounds before the target
// draws there, and making it takes longer than the rest of a draw. Belongs to one thread.
class NoiseCache {
    // So many rows are kept, or fewer where there are many tokens, but no fewer than are asked for at once.
    static constexpr int64_t MOST_ROWS = 512, MOST_NUMBERS = 1 << 24;
    // Fewer numbers are made sooner by one thread than others wake up.
    static constexpr int64_t LEAST_SHARED = 1 << 14;

    struct Place {
        uint64_t key;
        int64_t latest;  // request for it, 0 for none
    };

    int64_t width = 0, requests = 0, next = 0;
    std::unique_ptr<float[]> numbers;  // [places, width]; memory is taken as it is filled
    std::vector<Place> places;
    std::unordered_map<uint64_t, int64_t> place_of;

    void make_room(int64_t num, int64_t num_keys) {
        // What is made for many tokens begins with what is made for fewer.
        int64_t wide = std::max(num, width), usual = std::min(MOST_ROWS, MOST_NUMBERS / wide), had = places.size();
        bool is_too_much = had > 2 * std::max(usual, num_keys);  // of many that were wanted once
        if (wide == width && num_keys <= had && !is_too_much) return;
        width = wide;
        int64_t count = std::max(usual, num_keys);
        numbers.reset(new float[count * width]);
        places.assign(count, Place{});
        place_of.clear();
        next = 0;
    }

    // Takes the place of what was made longest ago, but not of what is wanted now.
    int64_t take_place(uint64_t key) {
        while (places[next].latest == requests) next = (next + 1) % int64_t(places.size());
        int64_t place = next;
        if (places[place].latest) place_of.erase(places[place].key);
        places[place] = {key, requests};
        place_of[key] = place;
        next = (place + 1) % int64_t(places.size());
        return place;
    }

  public:
    // Of each row the noise of `num` tokens of its key, null where the temperature is 0; until the next request.
    std::vector<const float *> rows(const uint64_t *keys, const float *temperatures, int64_t num_rows, int64_t num,
                                    int num_threads) {
        std::unordered_set<uint64_t> wanted;
        for (int64_t r = 0; r < num_rows; r++)
            if (temperatures[r] > 0) wanted.insert(keys[r]);
        make_room(num, int64_t(wanted.size()));
        requests++;
        std::vector<uint64_t> missing;
        for (uint64_t key : wanted) {
            auto found = place_of.find(key);
            if (found == place_of.end()) missing.push_back(key);
            else places[found->second].latest = requests;
        }
        std::vector<int64_t> made;
        for (uint64_t key : missing) made.push_back(take_place(key));
        if (!made.empty()) {
#pragma omp parallel num_threads(num_threads) if (int64_t(made.size()) * width >= LEAST_SHARED)
            gumbel(
                int64_t(made.size()), width, [&](int64_t i) { return missing[i]; },
                [&](int64_t i) { return &numbers[made[i] * width]; });
        }
        std::vector<const float *> noise(num_rows);
        for (int64_t r = 0; r < num_rows; r++)
            if (temperatures[r] > 0) noise[r] = &numbers[place_of[keys[r]] * width];
        return noise;
    }
};
