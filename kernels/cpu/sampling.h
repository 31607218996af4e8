// From logits to tokens: mask, maximum, weights, filters and one draw, a row after the other, all of a row in one
// thread. Nothing is written but the row's token and its maximum, so a row can be chosen from again.
#pragma once
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "pointwise.h"
#include "system.h"
#if (defined(__x86_64__) || defined(__aarch64__)) && defined(TEAM_SYSTEM)
#include "team.h"
#endif

struct Choice {  // kernels/sampling.py says what is in it; all of them [rows]
    const float* temperature;
    const int64_t* top_k;
    const double* top_p;
    const float* min_p;
    const double* uniform;
};

namespace {

constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr float FINITE = std::numeric_limits<float>::max();
constexpr int WORD = 32;  // ids of a word of the mask

// A row of logits as its mask shows it, 32 ids at a time.
class MaskedRow {
   public:
    MaskedRow(const float* logits, const int32_t* mask, int64_t vocab)
        : logits_(logits), mask_(mask), vocab_(vocab) {}

    int64_t words() const { return (vocab_ + WORD - 1) / WORD; }
    int64_t width(int64_t word) const { return std::min<int64_t>(WORD, vocab_ - word * WORD); }
    uint32_t allowed(int64_t word) const {
        const uint32_t bits = mask_ ? uint32_t(mask_[word]) : ~0u;
        const int64_t there = width(word);
        return there < WORD ? bits & ((1u << there) - 1) : bits;
    }
    // The word's logits, whether they are allowed or not; minus infinity past the vocabulary.
    void plain(int64_t word, Vec& low, Vec& high) const {
        const float* x = logits_ + word * WORD;
        if (width(word) < WORD) {
            float padded[WORD];
            for (int i = 0; i < WORD; i++) padded[i] = i < width(word) ? x[i] : NEVER;
            low = load(padded), high = load(padded + LANES);
        } else {
            low = load(x), high = load(x + LANES);
        }
    }

   private:
    const float* logits_;
    const int32_t* mask_;
    int64_t vocab_;
};

inline IVec of_bits(uint32_t bits) {
    const IVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (((int32_t(bits) - IVec{}) >> lane) & 1) != 0;
}

inline void forbid(uint32_t allowed, Vec& low, Vec& high) {
    if (allowed == ~0u) return;
    low = select(of_bits(allowed), low, splat(NEVER));
    high = select(of_bits(allowed >> LANES), high, splat(NEVER));
}

inline bool any(IVec mask) {
    int32_t found = 0;
    for (int i = 0; i < LANES; i++) found |= mask[i];
    return found != 0;
}

// The largest allowed logit and its lowest id. A logit that is no number or plus infinity is what is found, be it
// allowed or only beside one that is: words without an allowed id are not read.
inline float greatest(const MaskedRow& row, int64_t& token) {
    constexpr int64_t STRETCH = 16;  // words looked through before anything is compared
    float best = NEVER;
    int64_t where = -1;
    for (int64_t first = 0; first < row.words(); first += STRETCH) {
        const int64_t end = std::min(first + STRETCH, row.words());
        Vec most = splat(NEVER);
        IVec wrong = {};
        for (int64_t word = first; word < end; word++) {
            const uint32_t allowed = row.allowed(word);
            if (!allowed) continue;
            Vec low, high;
            row.plain(word, low, high);
            wrong |= ~(low <= FINITE) | ~(high <= FINITE);
            forbid(allowed, low, high);
            low = select(low > high, low, high);
            most = select(low > most, low, most);
        }
        if (any(wrong)) {
            token = 0;
            return std::numeric_limits<float>::quiet_NaN();
        }
        const float found = largest(most);
        if (found > best) best = found, where = first;
    }
    token = 0;
    for (int64_t word = std::max<int64_t>(where, 0); where >= 0; word++) {
        const uint32_t allowed = row.allowed(word);
        if (!allowed) continue;
        Vec low, high;
        row.plain(word, low, high);
        forbid(allowed, low, high);
        for (int i = 0; i < WORD; i++)
            if ((i < LANES ? low[i] : high[i - LANES]) == best) {
                token = word * WORD + i;
                return best;
            }
    }
    return best;
}

// The weights of a row, those of words without an allowed id left out.
struct Weights {
    std::vector<int64_t> words;
    std::vector<float> values;  // [words][32]

    int64_t count() const { return int64_t(words.size()); }
    double of_word(int64_t i) const { return sum(load(&values[i * WORD]) + load(&values[i * WORD + LANES])); }

    // w = exp((x - best) / temperature), 0 where x is not allowed.
    void weigh(const MaskedRow& row, float best, float temperature) {
        words.clear();
        values.resize(row.words() * WORD);
        for (int64_t word = 0; word < row.words(); word++) {
            const uint32_t allowed = row.allowed(word);
            if (!allowed) continue;
            Vec low, high;
            row.plain(word, low, high);
            forbid(allowed, low, high);
            float* to = &values[count() * WORD];
            store(to, exp_negative((low - best) / temperature));
            store(to + LANES, exp_negative((high - best) / temperature));
            words.push_back(word);
        }
        values.resize(count() * WORD);
    }

    double total() const {
        double sum = 0;
        for (int64_t i = 0; i < count(); i++) sum += of_word(i);
        return sum;
    }

    void drop_below(float least) {
        for (int64_t i = 0; i < count() * WORD; i += LANES) {
            const Vec w = load(&values[i]);
            store(&values[i], select(w >= least, w, Vec{}));
        }
    }

    // The first id at which the running sum exceeds `target`; the last one with a weight if none does.
    int64_t first_beyond(double target) const {
        double before = 0;
        int64_t last = 0;
        for (int64_t i = 0; i < count(); i++) {
            const double here = of_word(i);
            if (before + here > target || i + 1 == count()) {
                double running = before;
                for (int j = 0; j < WORD; j++) {
                    const float w = values[i * WORD + j];
                    running += w;
                    if (w > 0) last = words[i] * WORD + j;
                    if (w > 0 && running > target) return last;
                }
            } else if (here > 0) {
                for (int j = WORD - 1; j >= 0; j--)
                    if (values[i * WORD + j] > 0) {
                        last = words[i] * WORD + j;
                        break;
                    }
            }
            before += here;
        }
        return last;
    }
};

// The least weight that is kept when the largest are taken until there are `count` of them or they sum to `target`;
// `reached` is their sum then. Weights are at most 1: buckets by exponent and the first bits behind it find the few
// that have to be sorted.
class Largest {
   public:
    explicit Largest(const Weights& weights) : weights_(weights), counts_(BUCKETS), sums_(BUCKETS) {
        for (float w : weights.values)
            if (w > 0) counts_[bucket(w)]++, sums_[bucket(w)] += w;
    }

    float least(int64_t count, double target, double& reached) {
        int64_t taken = 0;
        reached = 0;
        for (int at = BUCKETS - 1; at >= 0; at--) {
            if (!counts_[at]) continue;
            if (taken + counts_[at] < count && reached + sums_[at] < target) {
                taken += counts_[at], reached += sums_[at];
                continue;
            }
            few_.clear();
            for (float w : weights_.values)
                if (w > 0 && bucket(w) == at) few_.push_back(w);
            std::sort(few_.begin(), few_.end(), std::greater<float>());
            for (float w : few_) {
                taken++, reached += w;
                if (taken >= count || reached >= target) return w;
            }
        }
        return 0;  // all of them
    }

   private:
    static constexpr int SHIFT = 18, BUCKETS = (0x3f800000 >> SHIFT) + 1;

    static int bucket(float w) {
        int32_t bits;
        std::memcpy(&bits, &w, 4);
        return bits >> SHIFT;
    }

    const Weights& weights_;
    std::vector<int64_t> counts_;
    std::vector<double> sums_;
    std::vector<float> few_;
};

inline int64_t draw(const MaskedRow& row, float best, const Choice& choice, int64_t r) {
    thread_local Weights weights;
    weights.weigh(row, best, choice.temperature[r]);
    float least = choice.min_p[r];
    if (choice.top_k[r] > 0 || choice.top_p[r] < 1) {
        constexpr double EVERYTHING = std::numeric_limits<double>::infinity();
        Largest largest(weights);
        double total = weights.total(), reached;
        if (choice.top_k[r] > 0) least = std::max(least, largest.least(choice.top_k[r], EVERYTHING, total));
        if (choice.top_p[r] < 1)
            least = std::max(least, largest.least(INT64_MAX, choice.top_p[r] * total, reached));
    }
    if (least > 0) weights.drop_below(least);
    return weights.first_beyond(choice.uniform[r] * weights.total());
}

// each(row) for all rows, shared out among threads. OpenMP's go on spinning for milliseconds, with which the next
// step's forward pass has begun: where there is a team it does this, too.
template <typename Each>
void each_row(int64_t rows, int threads, Each each) {
#if (defined(__x86_64__) || defined(__aarch64__)) && defined(TEAM_SYSTEM)
    Team::of(threads).run({rows}, [](void* context, int, int64_t row, int) { (*(Each*)context)(row); }, &each);
#else
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) each(row);
#endif
}

void choose(const float* logits, const int32_t* bitmask, int64_t rows, int64_t vocab, int64_t stride,
            int64_t word_stride, const Choice& choice, int64_t* tokens, float* best, int threads) {
    each_row(rows, rows > 1 && rows * vocab > SERIAL ? threads : 1, [&](int64_t r) {
        const MaskedRow row(logits + r * stride, bitmask ? bitmask + r * word_stride : nullptr, vocab);
        best[r] = greatest(row, tokens[r]);
        if (choice.temperature[r] > 0 && std::isfinite(best[r])) tokens[r] = draw(row, best[r], choice, r);
    });
}

}  // namespace
