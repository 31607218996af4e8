// Threads that run one program together: phases one after the other, each cut into items.
//
// A step of a decoder has some 250 phases of a few microseconds to some hundred. Forking and joining OpenMP
// threads for each costs more than some of the phases do, and a barrier stalls everyone as soon as the machine
// wants one of the cores for somebody else (the HTTP process, say). Here nobody waits for a thread, only for
// work: items are claimed, each thread's own share first and then the others', and a phase is over when its items
// are done. A thread that has lost its core between two items holds up nobody, and finds when it comes back that
// its share was taken. If it has lost it within one, the others sleep until that is done. They do not yield: whoever
// has a core that was yielded keeps it until the clock ticks, for milliseconds and however low its priority, while
// who is woken has it back at once from a process of the lowest class.
#pragma once
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "system.h"

// While it lives, this thread's floats that are too small for their exponent are zero.
class FlushToZero {
   public:
#if defined(__x86_64__)
    FlushToZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~FlushToZero() { _mm_setcsr(before_); }

   private:
    const unsigned before_;
#else
    FlushToZero() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | 1 << 24));
    }
    ~FlushToZero() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

   private:
    uint64_t before_;
#endif
};

inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#else
    asm volatile("yield");
#endif
}

// Not in a namespace without a name: the library has one team, whichever file asks for it.
class Team {
   public:
    typedef void (*Work)(void* context, int phase, int64_t item, int thread);
    struct Reads {  // what the first items of a phase read from memory, one after the other; bytes 0: not known, or nothing
        const char* from;
        int64_t bytes, items;
    };

    // The process's team of this size, made at first use, and again in a forked child, where it has no threads. `number`: of
    // several that may run at the same time.
    static Team& of(int threads, int64_t number = 0) {
        static std::mutex making;
        static std::map<std::tuple<pid_t, int, int64_t>, Team*> teams;  // never freed: they sleep until the process ends
        std::lock_guard<std::mutex> lock(making);
        Team*& team = teams[{getpid(), threads, number}];
        if (!team) team = new Team(threads);
        return *team;
    }

    int size() const { return int(threads_) + 1; }

    // Runs work(context, p, i, thread) for each phase p and each i below sizes[p]; returns when all are done. The
    // caller's thread calls `first`, if there is one, when the others have begun, and then joins them. reads [phases] or none:
    // a thread that waits for a phase's last items asks for what it will read in the next that reads any.
    void run(const std::vector<int64_t>& sizes, Work work, void* context, void (*first)() = nullptr,
             const std::vector<Reads>& reads = {}) {
        std::lock_guard<std::mutex> lock(running_);
        const uint32_t turn = turn_.load() + 1;
        Run& run = runs_[turn & 1];
        wait_until(run.inside, 0, [] { return false; });  // of stragglers from two turns ago
        run.begin(sizes, reads, size(), work, context);
        if (const int here = current_core(); here != left_free_) cores_.leave_free(left_free_ = here, handles_);
        turn_.store(turn);
        if (sleeping_.load()) wake_all(&turn_);
        if (first) first();
        run.take_part(0);
    }

    // For `work` to call: how many items a phase has that comes after its own.
    void resize(int phase, int64_t size) { runs_[turn_.load() & 1].sizes[phase] = size; }

   private:
    struct alignas(64) Counter {
        std::atomic<int32_t> value{0};
    };

    struct Run;
    // What a thread has asked for of a later phase, in the second cache.
    struct Ahead {
        static constexpr int64_t MOST = 128 << 10, AT_ONCE = 512;  // bytes: of a phase; between two looks at what it waits for
        int phase = 0;
        const char *at = nullptr, *end = nullptr;

        // Whether there was something left to ask for.
        bool ask(const Run& run, int waiting, int me) {
            if (phase <= waiting) {
                for (phase = waiting + 1; phase < int(run.reads.size()) && !run.reads[phase].bytes;) phase++;
                at = end = nullptr;
                if (phase < int(run.reads.size())) {
                    const Reads& next = run.reads[phase];
                    const int64_t item = std::min(next.items, run.sizes[phase] * me / run.threads);
                    at = next.from + next.bytes * item / next.items;
                    end = at + std::min(MOST, next.from + next.bytes - at);
                }
            }
            if (at >= end) return false;
            for (int64_t line = 0; line < AT_ONCE; line += 64) __builtin_prefetch(at + line, 0, 2);
            at += AT_ONCE;
            return true;
        }
    };

    struct Run {
        explicit Run(Team& team) : team(team) {}

        Team& team;
        std::atomic<int32_t> inside{0};
        std::vector<int64_t> sizes;
        std::vector<Reads> reads;
        Work work = nullptr;
        void* context = nullptr;
        int threads = 1;
        std::unique_ptr<Counter[]> next;  // [phases][threads], items claimed of each thread's share
        std::unique_ptr<Counter[]> done;  // [phases]
        size_t capacity = 0;

        void begin(const std::vector<int64_t>& phases, const std::vector<Reads>& read, int team, Work what, void* with) {
            sizes = phases, reads = read, work = what, context = with, threads = team;
            if (capacity < sizes.size()) {
                capacity = sizes.size();
                next.reset(new Counter[capacity * threads]);
                done.reset(new Counter[capacity]);
            }
            for (size_t i = 0; i < sizes.size() * threads; i++) next[i].value.store(0, std::memory_order_relaxed);
            for (size_t i = 0; i < sizes.size(); i++) done[i].value.store(0, std::memory_order_relaxed);
        }

        void take_part(int me) {
            // Tiles flush what is too small for a float's exponent, so the rest does too, or bits would differ.
            const FlushToZero flushing;
            work_off(me);
        }

        void work_off(int me) {
            Ahead ahead;
            for (int phase = 0; phase < int(sizes.size()); phase++) {
                const int64_t size = sizes[phase];
                int32_t mine = 0;
                for (int other = 0; other < threads; other++) {
                    const int whose = (me + other) % threads;
                    const int64_t first = size * whose / threads, count = size * (whose + 1) / threads - first;
                    std::atomic<int32_t>& claimed = next[phase * threads + whose].value;
                    while (claimed.load(std::memory_order_relaxed) < count) {
                        const int64_t item = claimed.fetch_add(1, std::memory_order_relaxed);
                        if (item >= count) break;
                        work(context, phase, first + item, me);
                        mine++;
                    }
                }
                std::atomic<int32_t>& done_here = done[phase].value;
                if (mine) team.add(done_here, mine, size);
                if (me && phase + 1 == int(sizes.size())) return;
                team.wait_until(done_here, size, [&] { return ahead.ask(*this, phase, me); });
            }
        }
    };

    explicit Team(int threads) : threads_(threads - 1) {
        for (int i = 1; i < threads; i++) {
            std::thread thread([this, i] { serve(i); });
            handles_.push_back(thread.native_handle());
            thread.detach();
        }
    }

    // Work in hand is a matter of microseconds, unless its thread has lost its core. `meanwhile`: returns whether it had something
    // to do.
    template <typename Meanwhile>
    void wait_until(std::atomic<int32_t>& count, int32_t reached, Meanwhile meanwhile) {
        for (int spins = 0; spins < 2000; spins++) {
            if (count.load(std::memory_order_acquire) == reached) return;
            if (!meanwhile()) pause_briefly();
        }
        waiting_.fetch_add(1);
        for (int32_t now; (now = count.load()) != reached;) sleep_while(&count, now);
        waiting_.fetch_sub(1);
    }

    void add(std::atomic<int32_t>& count, int32_t more, int32_t reached) {
        if (count.fetch_add(more) + more == reached && waiting_.load()) wake_all(&count);
    }

    void serve(int me) {
        for (uint32_t seen = 0;;) {
            seen = next_turn(seen);
            Run& run = runs_[seen & 1];
            run.inside.fetch_add(1);
            if (turn_.load() == seen) run.take_part(me);
            add(run.inside, -1, 0);
        }
    }

    // Between two steps the host samples, and others want the core: spin for a moment only, then sleep.
    uint32_t next_turn(uint32_t seen) {
        const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(30);
        for (;;) {
            const uint32_t turn = turn_.load();
            if (turn != seen) return turn;
            if (std::chrono::steady_clock::now() < until) {
                pause_briefly();
                continue;
            }
            sleeping_.fetch_add(1);
            sleep_while(&turn_, seen);
            sleeping_.fetch_sub(1);
        }
    }

    std::atomic<uint32_t> turn_{0};  // counts the runs; the threads sleep on it
    std::atomic<int> sleeping_{0};
    std::atomic<int> waiting_{0};  // asleep until a count is reached
    // By turn's parity: a straggler of the last run reads its own, not the next one's.
    Run runs_[2]{Run(*this), Run(*this)};
    std::mutex running_;
    // Linux wakes a thread where it slept last. If that is the caller's core it waits there for milliseconds, and
    // the core of its own goes to whoever else has something to do. So the others stay away from the caller's.
    const Cores cores_;
    int left_free_ = -1;  // the core that the caller had when it was last looked at
    std::vector<pthread_t> handles_;
    const size_t threads_;
};
