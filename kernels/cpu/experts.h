// Mixtures of experts: which experts a router's logits choose for a row, and the rows of a step by expert.
#pragma once
#include <cfloat>
#include <vector>

#include "vector.h"

namespace {

struct Routing {  // as kernels/moe.py has it
    int64_t experts, top_k, renormalize, sigmoid, groups, kept;
    float scale, epsilon, least;
};

// The places of the `count` largest of x [n], the largest first; of equal ones the first. They are lost in x. What is no number
// comes last.
inline void take_largest(float* x, int64_t n, int64_t count, int32_t* places) {
    for (int64_t i = 0; i < n; i++)
        if (!(x[i] > -FLT_MAX)) x[i] = -FLT_MAX;
    for (int64_t found = 0; found < count; found++) {
        int32_t best = 0;
        for (int32_t i = 1; i < n; i++)
            if (x[i] > x[best]) best = i;
        places[found] = best;
        x[best] = -INFINITY;
    }
}

// Chooses for a row, see `reference.route_scored`; memory of one thread.
class Router {
   public:
    explicit Router(const Routing& routing)
        : r_(routing), scores_((routing.experts + LANES - 1) / LANES * LANES + LANES), ranked_(scores_.size()),
          of_groups_(routing.groups), kept_(routing.kept) {}

    // logits(i): those of the experts from i on, of which there may be less than LANES. bias: null for none.
    template <typename Logits>
    void choose(Logits logits, const float* bias, int32_t* experts, float* weights) {
        for (int64_t i = 0; i < r_.experts; i += LANES) store(scores_.data() + i, logits(i));
        for (int64_t i = r_.experts; i < int64_t(scores_.size()); i++) scores_[i] = -INFINITY;
        r_.sigmoid ? sigmoid() : softmax();
        for (int64_t i = 0; i < r_.experts; i++) ranked_[i] = scores_[i] + (bias ? bias[i] : 0.0f);
        if (r_.groups > 1) leave_out_groups();
        take_largest(ranked_.data(), r_.experts, r_.top_k, experts);
        float total = 0;
        for (int64_t j = 0; j < r_.top_k; j++) total += weights[j] = scores_[experts[j]];
        const float divisor = r_.renormalize ? std::max(total + r_.epsilon, r_.least) : 1.0f;
        for (int64_t j = 0; j < r_.top_k; j++) weights[j] = weights[j] / divisor * r_.scale;
    }

   private:
    void softmax() {
        Vec most = splat(-INFINITY), total = {};
        for (int64_t i = 0; i < r_.experts; i += LANES) most = larger(most, load(scores_.data() + i));
        most = splat(largest(most));
        for (int64_t i = 0; i < r_.experts; i += LANES) {
            const Vec e = exp_negative(load(scores_.data() + i) - most);
            total += e;
            store(scores_.data() + i, e);
        }
        const Vec all = splat(sum(total));
        for (int64_t i = 0; i < r_.experts; i += LANES) store(scores_.data() + i, load(scores_.data() + i) / all);
    }
    void sigmoid() {  // through exp(-|x|), which cannot overflow
        for (int64_t i = 0; i < r_.experts; i += LANES) {
            const Vec x = load(scores_.data() + i), e = exp_negative(select(x < 0.0f, x, -x));
            store(scores_.data() + i, select(x < 0.0f, e, splat(1.0f)) / (e + 1.0f));
        }
    }
    void leave_out_groups() {
        const int64_t wide = r_.experts / r_.groups;
        for (int64_t g = 0; g < r_.groups; g++) {
            float first = -INFINITY, second = -INFINITY;
            for (int64_t i = g * wide; i < (g + 1) * wide; i++) {
                second = std::max(second, std::min(first, ranked_[i]));
                first = std::max(first, ranked_[i]);
            }
            of_groups_[g] = r_.sigmoid ? first + second : first;
        }
        take_largest(of_groups_.data(), r_.groups, r_.kept, kept_.data());
        for (int64_t g = 0; g < r_.groups; g++)
            if (std::find(kept_.begin(), kept_.end(), g) == kept_.end())
                std::fill(ranked_.begin() + g * wide, ranked_.begin() + (g + 1) * wide, -FLT_MAX);
    }

    const Routing r_;
    std::vector<float> scores_, ranked_, of_groups_;
    std::vector<int32_t> kept_;
};

// What the rows of a step have chosen, [rows][top_k], and the rows by expert: in their order, from a multiple of 16 on.
struct Routed {
    struct Busy {  // an expert that has rows
        int64_t expert, first, rows;
    };
    std::vector<int32_t> experts;
    std::vector<float> weights;
    std::vector<int64_t> places;
    std::vector<Busy> busy;

    // How many places there may be.
    static int64_t most(int64_t rows, const Routing& r) { return rows * r.top_k + 15 * std::min(rows * r.top_k, r.experts); }

    void reserve(int64_t rows, const Routing& r) {
        experts.resize(rows * r.top_k), weights.resize(rows * r.top_k), places.resize(rows * r.top_k);
        next_.resize(r.experts);
    }
    void sort(int64_t rows, const Routing& r) {
        std::fill(next_.begin(), next_.end(), 0);
        for (int64_t i = 0; i < rows * r.top_k; i++) next_[experts[i]]++;
        busy.clear();
        int64_t first = 0;
        for (int64_t e = 0; e < r.experts; e++) {
            if (!next_[e]) continue;
            busy.push_back({e, first, next_[e]});
            next_[e] = first;
            first += (busy.back().rows + 15) / 16 * 16;
        }
        for (int64_t i = 0; i < rows * r.top_k; i++) places[i] = next_[experts[i]]++;
    }

   private:
    std::vector<int64_t> next_;
};

}  // namespace
