// How the threads of one call share what they do, and the cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <omp.h>
#include <sched.h>
#include <vector>

// How many parts of one thread's run were taken, this time and, set to 0 meanwhile, next time; and its core.
struct alignas(64) Taken {
    std::atomic<int64_t> count[2] = {};
    std::atomic<int> core = -1;
};

// One thread of a team, in a parallel region; `taken` has one place for each thread, for this region alone.
class Team {
public:
    explicit Team(std::vector<Taken> &taken)
        : taken(taken), threads(omp_get_num_threads()), thread(omp_get_thread_num()) {
        spread();
    }

    // The first of `parts` that this thread takes.
    int64_t first_part(int64_t parts) const { return parts * thread / threads; }

    // Called by every thread of the team: `run(part, following)` for each of `parts`, by one of them. Each takes a run
    // of neighbours in order, as memory is read fastest so, a quarter of what is left of it at a time, as an atomic count
    // waits for what is still being read; and then what is left of the others', one by one. `following`: the part that
    // this thread will take next, if nobody else does; -1 if there is none. Returns when all are done.
    template <class Run> void share(int64_t parts, Run run) {
        spread();
        for (int64_t i = 0; i < threads; i++) {
            int64_t whose = (thread + i) % threads, first = parts * whose / threads, end = parts * (whose + 1) / threads;
            auto &count = taken[whose].count[turn];
            for (;;) {
                int64_t left = end - first - count.load(std::memory_order_relaxed);
                int64_t several = i || left < 4 ? 1 : left / 4;
                int64_t part = first + count.fetch_add(several), last = part + several < end ? part + several : end;
                if (part >= end) break;
                for (; part < last; part++) run(part, part + 1 < end ? part + 1 : -1);
            }
        }
        // Nobody looks at it before the next time.
        taken[thread].count[1 - turn] = 0;
        turn = 1 - turn;
#pragma omp barrier
    }

private:
    // Leaves the core of another one of the team. A thread that wakes while the other cores are busy for a moment is
    // put there, and the kernel leaves it there for milliseconds, however idle the others are by then: as long as a
    // step. A worker's own messages keep a core busy just when the next step begins.
    void spread() {
        int here = sched_getcpu();
        taken[thread].core.store(here, std::memory_order_relaxed);
        bool alone = true;
        for (int64_t i = 0; i < thread; i++) alone &= taken[i].core.load(std::memory_order_relaxed) != here;
        if (alone) return;
        cpu_set_t allowed, free;
        if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
        free = allowed;
        for (int64_t i = 0; i < threads; i++) {
            int core = taken[i].core.load(std::memory_order_relaxed);
            if (core >= 0) CPU_CLR(core, &free);
        }
        if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free)) return;
        sched_setaffinity(0, sizeof allowed, &allowed);
        taken[thread].core.store(sched_getcpu(), std::memory_order_relaxed);
    }

    std::vector<Taken> &taken;
    int64_t threads, thread;
    int turn = 0;
};
