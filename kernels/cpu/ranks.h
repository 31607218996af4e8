// What the ranks of a decoder add up, processes of one machine: each writes its part into memory that all have mapped.
//
// A rank's part of a sum lies in one of its two slots, which it uses in turn: others may still read the last part while it
// writes the next one. To write the one after that it waits for no one: it has seen that all have given the next part, and they
// give it when they have read the last.
#pragma once
#include "rows.h"
#include "team.h"

namespace {

class RankSums {
   public:
    static constexpr int64_t FIRST = 4096;  // where the slots begin; before them each rank has a counter of its parts

    // `check` says whether all ranks are still there; it is called now and then while this one waits.
    void begin(char* shared, int64_t rank, int64_t ranks, int64_t slot_bytes, int (*check)()) {
        shared_ = shared, rank_ = rank, ranks_ = ranks, slot_bytes_ = slot_bytes, check_ = check, ended_ = false;
        before_ = shared ? counter(rank).given.load() : 0;
    }

    explicit operator bool() const { return shared_; }
    int64_t size() const { return ranks_; }

    // A rank's part of the step's sum of this number, from 0 on.
    Sums part(int64_t sum, int64_t rank, int64_t width) const {
        const int64_t slot = (before_ + sum) % 2 * ranks_ + rank;
        return {(float*)(shared_ + FIRST + slot * slot_bytes_), width / 16};
    }
    Sums own(int64_t sum, int64_t width) const { return part(sum, rank_, width); }

    // This rank's part is there. Returns when those of all are.
    void meet(int64_t sum) {
        const uint32_t now = before_ + uint32_t(sum) + 1;
        Counter& mine = counter(rank_);
        mine.given.store(now);
        if (mine.sleeping.load()) wake_all_shared(&mine.given);
        for (int64_t other = 0; other < ranks_; other++) wait_for(counter(other), now);
    }

   private:
    struct alignas(64) Counter {
        std::atomic<uint32_t> given;  // parts so far; it may overflow
        std::atomic<uint32_t> sleeping;
    };
    static constexpr long CHECK_NANOSECONDS = 50'000'000;

    Counter& counter(int64_t rank) const { return ((Counter*)shared_)[rank]; }

    void wait_for(Counter& other, uint32_t wanted) {
        for (int spins = 0; spins < 2000; spins++) {
            if (int32_t(other.given.load(std::memory_order_acquire) - wanted) >= 0) return;
            pause_briefly();
        }
        for (uint32_t now; !ended_ && int32_t((now = other.given.load()) - wanted) < 0;) {
            other.sleeping.fetch_add(1);
            const bool late = !sleep_while_shared(&other.given, now, CHECK_NANOSECONDS);
            other.sleeping.fetch_sub(1);
            if (late && check_ && !check_()) ended_ = true;
        }
    }

    char* shared_ = nullptr;
    int64_t rank_ = 0, ranks_ = 1, slot_bytes_ = 0;
    int (*check_)() = nullptr;
    uint32_t before_ = 0;  // parts before this step
    bool ended_ = false;
};

}  // namespace
