// A whole step of a decoder as one program: norm, q k v, rotation, attention, o, norm, gate and up, down, for all
// layers, without leaving C++ and without a fork or join between. In place of gate and up and down a layer may have a router and
// experts.
//
// The residual stream and every sum are float32; what enters a product is rounded to bfloat16. A row's result
// depends on its own sequence and adapter alone, bit for bit: not on the rows beside it, nor on how its prompt was
// cut into chunks, nor on the number of threads.
#pragma once
#include <vector>

#include "attention_tiles.h"
#include "decoder_shape.h"
#include "expand.h"
#include "logit_mask.h"
#include "ranks.h"
#include "shrink.h"
#include "team.h"

namespace {

class Decoder {
   public:
    Decoder(const DecoderShape& shape, const DecoderLayer* layers, int threads)
        : m_(shape),
          layers_(layers, layers + shape.layers),
          team_(Team::of(threads, shape.rank)) {
        for (int i = 0; i < threads; i++) scratch_.emplace_back(shape.dim, shape.routing);
        after_norms_.push_back(shape.output->kept);
        for (const DecoderLayer& layer : layers_) {
            after_norms_.push_back(layer.qkv->kept);
            after_attention_.push_back(layer.o->kept);
            if (layer.gate_up) after_norms_.push_back(layer.gate_up->kept), after_gates_.push_back(layer.down->kept);
            if (!layer.router) continue;
            after_norms_.insert(after_norms_.end(), {layer.router->kept, layer.experts_gate_up[0]->kept});
            to_experts_.push_back(layer.experts_gate_up[0]->kept);
            after_experts_gates_.push_back(layer.experts_down[0]->kept);
        }
    }

    void forward(const DecoderBatch& batch) {
        b_ = &batch;
        ranks_.begin(batch.shared, m_.rank, batch.ranks, batch.slot_bytes, batch.check);
        reserve(batch.count);
        plan_.reset(batch.lora ? new LoraPlan(*batch.lora, batch.count, team_.size()) : nullptr);
        if (plan_) shrunk_ = Shrunk(shrunk_memory_, plan_->size);
        find_runs();
        cut_queries();
        phases_.clear();
        for (int64_t layer = 0; layer < m_.layers; layer++) {
            const DecoderLayer& l = layers_[layer];
            add(layer, NORM, row_blocks());
            product(layer, QKV_PRODUCT, QKV, *l.qkv);
            if (plan_) add(layer, QKV_EXPAND, plan_->expand[QKV].size());
            if (several_) add(layer, APPEND, batch.count);
            add(layer, ATTEND, queries_.size());
            product(layer, O_PRODUCT, O, *l.o);
            if (plan_) add(layer, O_EXPAND, plan_->expand[O].size());
            if (ranks_) add(layer, O_MEET, 1);
            if (l.router) {  // what it chooses says how many items the experts have
                add(layer, ROUTE, row_blocks());
                if (batch.count > 1) add(layer, BY_EXPERT, row_blocks());
                add(layer, EXPERTS_GATE_UP, 1);
                add(layer, EXPERTS_DOWN, 1);
                continue;
            }
            add(layer, MLP_NORM, row_blocks());
            product(layer, GATE_UP_PRODUCT, GATE_UP, *l.gate_up);
            if (plan_) add(layer, GATE_UP_EXPAND, few_.size() * gate_blocks(l));
            product(layer, DOWN_PRODUCT, DOWN, *l.down);
            if (plan_) add(layer, DOWN_EXPAND, plan_->expand[DOWN].size());
            if (ranks_) add(layer, DOWN_MEET, 1);
        }
        add(m_.layers, LAST, row_blocks());
        unrouted_ = row_blocks();
        run(batch.count, batch.overlap);
    }

    // hidden [count][hidden] -> logits [count][vocab]; `logit_mask` (null: all) has a bit for each. Of 32 of a row without one
    // nothing may be written.
    void logits(const float* hidden, int64_t count, const uint32_t* logit_mask, float* logits) {
        reserve(count);
        head_from_ = hidden, head_to_ = logits, head_count_ = count;
        head_.set(logit_mask, count, m_.output->groups);
        phases_.clear();
        add(0, HEAD_NORM, (count + BLOCK_ROWS - 1) / BLOCK_ROWS);
        const int64_t items = items_of(*m_.output, count);
        add(0, HEAD_PRODUCT, items, items, m_.output);
        run(count);
    }

   private:
    enum Kind {
        NORM, QKV_PRODUCT, QKV_EXPAND, APPEND, ATTEND, O_PRODUCT, O_EXPAND, O_MEET, MLP_NORM, GATE_UP_PRODUCT,
        GATE_UP_EXPAND, DOWN_PRODUCT, DOWN_EXPAND, DOWN_MEET, ROUTE, BY_EXPERT, EXPERTS_GATE_UP, EXPERTS_DOWN, LAST, HEAD_NORM,
        HEAD_PRODUCT
    };
    struct Phase {
        int64_t layer;
        Kind kind;
        int64_t products;  // items of the base's product; after them come those of the adapters' shrink
    };
    struct Queries {  // of one row and key/value head
        int64_t row, head, first, count;
    };
    struct Scratch {
        AttentionScratch attention;
        LoraScratch lora;
        Router router;
        Scratch(int64_t dim, const Routing& routing) : attention(dim), router(routing) {}
    };
    struct Mlp {  // one of those of a layer with experts, and its rows in this step
        const Packed *gate_up, *down;
        const float *gate_up_bias, *down_bias;  // null: none
        Rows x, inner;
        Sums y;
        int64_t rows, gate_up_end, down_end;  // the ends of its items, among those of the MLPs before it
    };
    static constexpr int64_t BLOCK_ROWS = 4;

    // w: what the phase's products read; null: it has none.
    void add(int64_t layer, Kind kind, int64_t size, int64_t products = 0, const Packed* w = nullptr) {
        if (!size) return;
        phases_.push_back({layer, kind, products});
        sizes_.push_back(size);
        reads_.push_back({w ? w->memory : nullptr, w ? w->bytes() : 0, products});
    }
    void product(int64_t layer, Kind kind, Input input, const Packed& w) {
        const int64_t products = items_of(w, b_->count), shrinks = plan_ ? int64_t(plan_->shrink[input].size()) : 0;
        if (plan_ && plan_->at_hand) {  // the products want what was shrunk
            add(layer, kind, shrinks);
            add(layer, kind, products, products, &w);
        } else {
            add(layer, kind, products + shrinks, products, &w);
        }
    }
    void run(int64_t rows, void (*first)() = nullptr) {
        if (rows > PANEL) reads_.clear();  // the second cache is full of rows
        team_.run(sizes_, [](void* self, int phase, int64_t item, int thread) {
            ((Decoder*)self)->work(((Decoder*)self)->phases_[phase], item, thread);
        }, this, first, reads_);
        sizes_.clear();
        reads_.clear();
    }
    int64_t row_blocks() const { return (b_->count + BLOCK_ROWS - 1) / BLOCK_ROWS; }
    int64_t gate_width(const DecoderLayer& l) const {  // wide enough to stream, narrow enough to share
        return LoraPlan::many(*b_->lora, team_.size()) ? l.down->k : 768;
    }
    int64_t gate_blocks(const DecoderLayer& l) const { return (l.down->k + gate_width(l) - 1) / gate_width(l); }

    void reserve(int64_t count) {
        const int64_t rows = (count + PANEL - 1) / PANEL * PANEL;
        if (rows <= capacity_) return;
        capacity_ = rows;
        residual_.resize(rows * m_.hidden);
        output_ = sums(output_memory_, rows, m_.hidden);
        qkv_ = sums(qkv_memory_, rows, (m_.heads + 2 * m_.kv_heads) * m_.dim);
        gate_up_ = sums(gate_up_memory_, rows, 2 * m_.inner);
        normed_ = Rows(normed_memory_, rows, m_.hidden, after_norms_);
        mixed_ = Rows(mixed_memory_, rows, m_.heads * m_.dim, after_attention_);
        inner_ = Rows(inner_memory_, rows, m_.inner, after_gates_);
        if (!m_.routing.experts) return;
        const int64_t places = Routed::most(rows, m_.routing);
        routed_.reserve(rows, m_.routing);
        scores_ = sums(scores_memory_, rows, shared_gate_score() + GROUP);
        by_expert_ = Rows(by_expert_memory_, places, m_.hidden, to_experts_);
        experts_inner_ = Rows(experts_inner_memory_, places, m_.experts_inner, after_experts_gates_);
        experts_output_ = sums(experts_output_memory_, places, m_.hidden);
    }
    // Behind those of the router.
    int64_t shared_gate_score() const { return (m_.routing.experts + GROUP - 1) / GROUP * GROUP; }
    static Sums sums(std::vector<float>& memory, int64_t rows, int64_t width) {
        memory.assign(rows * width + 16, 0.0f);
        return {(float*)((uintptr_t(memory.data()) + 63) & ~uintptr_t(63)), width / 16};
    }

    void cut_queries() {
        const int64_t group = m_.heads / m_.kv_heads, block = std::max<int64_t>(1, QUERIES / group);
        queries_.clear();
        several_ = false;
        for (int64_t row = 0; row < b_->rows; row++) {
            const int64_t count = b_->query_start[row + 1] - b_->query_start[row];
            several_ |= count > 1;
            for (int64_t first = 0; first < count; first += block)
                for (int64_t head = 0; head < m_.kv_heads; head++)
                    queries_.push_back({row, head, first, std::min(block, count - first)});
        }
    }

    void find_runs() {
        runs_ = plan_ ? plan_->runs : std::vector<Run>{LoraPlan::plain(0, b_->count)};
        few_.clear();
        stored_.assign((b_->count + PANEL - 1) / PANEL, false);
        for (size_t i = 0; i < runs_.size(); i++)
            if (runs_[i].few()) {
                few_.push_back(int64_t(i));
                stored_[runs_[i].row / PANEL] = stored_[(runs_[i].row + runs_[i].rows - 1) / PANEL] = true;
            }
    }

    void work(const Phase& phase, int64_t item, int thread) {
        const int64_t layer = phase.layer;
        const DecoderLayer& l = layers_[std::min(layer, m_.layers - 1)];
        switch (phase.kind) {
            case NORM: return norm_rows(item, layer ? DOWN : INPUTS, 2 * layer - 1, l.attention_norm, tap_of(layer));
            case MLP_NORM: return norm_rows(item, O, 2 * layer, l.mlp_norm, -1);
            case LAST: return norm_rows(item, DOWN, 2 * layer - 1, nullptr, tap_of(layer));
            case O_MEET: return ranks_.meet(2 * layer);
            case DOWN_MEET: return ranks_.meet(2 * layer + 1);
            case QKV_PRODUCT: return either(phase, item, thread, QKV, *l.qkv, normed_, l.qkv_bias, qkv_);
            case O_PRODUCT: return either(phase, item, thread, O, *l.o, mixed_, l.o_bias, output(2 * layer));
            case DOWN_PRODUCT:
                return either(phase, item, thread, DOWN, *l.down, inner_.of_width(l.down->k), l.down_bias,
                              output(2 * layer + 1));
            case GATE_UP_PRODUCT:
                if (item >= phase.products) return shrink_item(phase, item, thread, GATE_UP, normed_);
                return gated(normed_, b_->count, *l.gate_up, item, l.gate_up_bias, at_hand(GATE_UP, layer, thread),
                             inner_.of_width(l.down->k), runs_);
            case QKV_EXPAND: return expand(QKV, item, layer, qkv_);
            case O_EXPAND: return expand(O, item, layer, output(2 * layer));
            case DOWN_EXPAND: return expand(DOWN, item, layer, output(2 * layer + 1));
            case GATE_UP_EXPAND: return expand_gated(l, item, layer);
            case APPEND: return append(l, layer, item);
            case ATTEND: return attend(l, layer, item, scratch_[thread].attention);
            case ROUTE:
                norm_rows(item, O, 2 * layer, l.mlp_norm, -1);
                return route(phase, l, item, thread);
            case BY_EXPERT: return put_by_expert(item);
            case EXPERTS_GATE_UP: {
                const Mlp& mlp = mlp_of(item, &Mlp::gate_up_end);
                const int64_t own = item - (mlp.gate_up_end - items_of(*mlp.gate_up, mlp.rows));
                return gated(mlp.x, mlp.rows, *mlp.gate_up, own, mlp.gate_up_bias, unchanged(thread), mlp.inner, without_adapters_);
            }
            case EXPERTS_DOWN: {
                const Mlp& mlp = mlp_of(item, &Mlp::down_end);
                const int64_t own = item - (mlp.down_end - items_of(*mlp.down, mlp.rows));
                return product_item(mlp.inner, mlp.rows, *mlp.down, own, mlp.down_bias, unchanged(thread), mlp.y);
            }
            case HEAD_NORM: return head_norm(item);
            case HEAD_PRODUCT: return head(item);
        }
    }

    // Where the result of an o (even numbers) or of a down goes: two a layer.
    Sums output(int64_t number) const { return ranks_ ? ranks_.own(number, m_.hidden) : output_; }

    // The layer's place among those that are tapped; -1: it is not.
    int64_t tap_of(int64_t layer) const {
        for (int64_t tap = 0; tap < b_->taps; tap++)
            if (b_->tapped[tap] == layer) return tap;
        return -1;
    }

    // residual = embedding, or residual + what the module before gave, output `number`; then the norm, into tiles, or the result.
    void norm_rows(int64_t item, Input after, int64_t number, const float* weight, int64_t tap) {
        const int64_t end = std::min(b_->count, (item + 1) * BLOCK_ROWS), n = m_.hidden;
        for (int64_t row = item * BLOCK_ROWS; row < end; row++) {
            float* x = residual_.data() + row * n;
            if (after == INPUTS && m_.embedded && !b_->inputs) {
                plain_row(*m_.embedded, b_->tokens[row], x);
            } else if (after == INPUTS) {
                const bf16* from = b_->inputs ? b_->inputs + row * n : m_.embedding + b_->tokens[row] * n;
                for (int64_t d = 0; d < n; d += LANES) store(x + d, load(from + d));
            } else if (ranks_) {
                add_parts(x, row, number);
            } else if (layers_[number / 2].router && after == DOWN) {
                add_experts(layers_[number / 2], x, row);
            } else {
                const float* y = output_.at(row, 0);
                for (int64_t d = 0; d < n; d += LANES, y += Sums::NEXT) store(x + d, load(x + d) + load(y));
            }
            if (tap >= 0) std::memcpy(b_->kept + (row * b_->taps + tap) * n, x, n * sizeof(float));
            if (weight)
                normalise(x, weight, row);
            else
                std::memcpy(b_->hidden + row * n, x, n * sizeof(float));
        }
    }

    // x += the parts of all ranks, which are added in the order of the ranks: all have the same bits.
    void add_parts(float* x, int64_t row, int64_t number) const {
        const float* first = ranks_.part(number, 0, m_.hidden).at(row, 0);
        const int64_t further = ranks_.part(number, 1, m_.hidden).at(row, 0) - first;
        for (int64_t d = 0; d < m_.hidden; d += LANES, first += Sums::NEXT) {
            Vec total = load(first);
            for (int64_t rank = 1; rank < ranks_.size(); rank++) total += load(first + rank * further);
            store(x + d, load(x + d) + total);
        }
    }

    // x += what a row's experts give, in the order of its choice, and then what the MLP of all tokens does.
    void add_experts(const DecoderLayer& l, float* x, int64_t row) const {
        const int64_t first = row * m_.routing.top_k, last = first + m_.routing.top_k;
        const float* shared = l.gate_up ? output_.at(row, 0) : nullptr;
        const float score = l.shared_gate ? *scores_.at(row, shared_gate_score()) : 0;
        const Vec part = splat(l.shared_gate ? 1.0f / (1.0f + exp_scalar(-std::fabs(score))) : 1.0f);
        const Vec of_shared = score < 0 ? splat(1.0f) - part : part;  // of exp(-|x|), which cannot overflow
        for (int64_t d = 0; d < m_.hidden; d += LANES) {
            Vec total = {};
            for (int64_t i = first; i < last; i++)
                total = fma(load(experts_output_.at(routed_.places[i], d)), splat(routed_.weights[i]), total);
            if (shared) total = fma(load(shared + d / 16 * Sums::NEXT), of_shared, total);
            store(x + d, load(x + d) + total);
        }
    }

    // The experts of a block of rows. Whoever has the last block shares out the work of all.
    void route(const Phase& phase, const DecoderLayer& l, int64_t item, int thread) {
        const int64_t first = item * BLOCK_ROWS, last = std::min(b_->count, first + BLOCK_ROWS), rows = last - first;
        auto score = [&](const Packed& w, const float* bias, const Sums& y) {
            for (int64_t i = 0; i < items_of(w, rows); i++)
                product_item(normed_.from(first), rows, w, i, bias, unchanged(thread), y);
        };
        score(*l.router, l.router_bias, scores_.from(first));
        if (l.shared_gate) score(*l.shared_gate, nullptr, {scores_.at(first, shared_gate_score()), scores_.wide});
        for (int64_t row = first; row < last; row++)
            scratch_[thread].router.choose([&](int64_t i) { return load(scores_.at(row, i)); }, l.correction,
                                           &routed_.experts[row * m_.routing.top_k], &routed_.weights[row * m_.routing.top_k]);
        if (--unrouted_) return;
        unrouted_ = row_blocks();  // for the next layer
        share_out(l);
        const int next = int(&phase - phases_.data()) + (b_->count > 1 ? 2 : 1);
        team_.resize(next, mlps_.back().gate_up_end);
        team_.resize(next + 1, mlps_.back().down_end);
    }

    // All MLPs that have rows, and the ends of their items.
    void share_out(const DecoderLayer& l) {
        mlps_.clear();
        int64_t gate_up_end = 0, down_end = 0;
        auto add = [&](const Packed& gate_up, const Packed& down, const float* gate_up_bias, const float* down_bias, const Rows& x,
                       const Rows& inner, const Sums& y, int64_t rows) {
            gate_up_end += items_of(gate_up, rows), down_end += items_of(down, rows);
            mlps_.push_back({&gate_up, &down, gate_up_bias, down_bias, x, inner, y, rows, gate_up_end, down_end});
        };
        routed_.sort(b_->count, m_.routing);
        for (const Routed::Busy& one : routed_.busy)
            add(*l.experts_gate_up[one.expert], *l.experts_down[one.expert],
                l.experts_gate_up_bias ? l.experts_gate_up_bias[one.expert] : nullptr,
                l.experts_down_bias ? l.experts_down_bias[one.expert] : nullptr,
                b_->count > 1 ? by_expert_.from(one.first) : normed_, experts_inner_.from(one.first),
                experts_output_.from(one.first), one.rows);
        if (l.gate_up) add(*l.gate_up, *l.down, l.gate_up_bias, l.down_bias, normed_, inner_.of_width(l.down->k), output_, b_->count);
    }
    const Mlp& mlp_of(int64_t item, int64_t Mlp::*end) const {
        return *std::upper_bound(mlps_.begin(), mlps_.end(), item, [&](int64_t i, const Mlp& one) { return i < one.*end; });
    }

    void put_by_expert(int64_t item) const {
        const int64_t last = std::min(b_->count, (item + 1) * BLOCK_ROWS), k = m_.routing.top_k;
        for (int64_t i = item * BLOCK_ROWS * k; i < last * k; i++) by_expert_.copy(routed_.places[i], normed_, i / k);
    }

    void normalise(const float* x, const float* weight, int64_t row) {
        const Vec scale = splat(inverse_rms(x, m_.hidden, m_.eps));
        for (int64_t d = 0; d < m_.hidden; d += LANES)
            normed_.put(row, d, (load(x + d) * scale * load(weight + d)));
    }

    void head_norm(int64_t item) {
        const int64_t end = std::min(head_count_, (item + 1) * BLOCK_ROWS);
        for (int64_t row = item * BLOCK_ROWS; row < end; row++)
            normalise(head_from_ + head_.rows[row] * m_.hidden, m_.norm, row);
    }

    // An item of a product, or of its adapters' shrink.
    void either(const Phase& phase, int64_t item, int thread, Input input, const Packed& w, const Rows& x,
                const float* bias, const Sums& y) {
        if (item >= phase.products) return shrink_item(phase, item, thread, input, x);
        product_item(x, b_->count, w, item, bias, at_hand(input, phase.layer, thread), y);
    }
    AtHand at_hand(Input input, int64_t layer, int thread) {
        return {b_->lora, plan_.get(), input, layer, shrunk_, scratch_[thread].lora};
    }
    AtHand unchanged(int thread) { return {nullptr, nullptr, INPUTS, 0, shrunk_, scratch_[thread].lora}; }

    void product_item(const Rows& x, int64_t rows, const Packed& w, int64_t item, const float* bias, AtHand more,
                      const Sums& y) const {
        auto place = [&](int64_t row, int64_t count, int64_t g) {
            const Quarters there(y, row, w, g);
            there.expect(count);
            return there;
        };
        multiply_item(x, rows, w, item, bias, more, place, [](int64_t, int64_t, int64_t, const Quarters&) {});
    }
    void shrink_item(const Phase& phase, int64_t item, int thread, Input input, const Rows& x) {
        shrink(*b_->lora, *plan_, input, item - phase.products, phase.layer, x, shrunk_, scratch_[thread].lora);
    }

    void head(int64_t item) {
        const Packed& w = *m_.output;
        alignas(64) float sums[PANEL * GROUP];
        Nothing more;
        auto place = [&](int64_t row, int64_t count, int64_t g) {
            for (int64_t i = 0; i < count; i++)
                for (int64_t half = 0; half < 2; half++)
                    __builtin_prefetch(head_to_ + head_.rows[row + i] * m_.vocab + w.column(g, half), 1);
            return Quarters(sums);
        };
        auto take = [&](int64_t row, int64_t count, int64_t g, const Quarters& c) {
            for (int64_t half = 0; half < 2; half++) {
                const int64_t there = w.width(g, half);
                for (int64_t i = 0; i < count; i++)
                    store_first(head_to_ + head_.rows[row + i] * m_.vocab + w.column(g, half), load(c.at(i, half)), there);
            }
        };
        multiply_item(normed_, Count(head_count_, head_.of_group.data()), w, item, nullptr, more, place, take);
    }

    // Calls visit(run, first, rows) for the parts of runs among `count` rows from `row` on.
    template <typename Visit>
    static void each_run(const std::vector<Run>& runs, int64_t row, int64_t count, Visit visit) {
        for (const Run& run : runs) {
            const int64_t first = std::max(row, run.row), last = std::min(row + count, run.row + run.rows);
            if (first < last) visit(run, first, last);
        }
    }

    Vec activated(Vec gate, Vec up) const { return m_.clamped ? clamped_times(gate, up) : silu_times(gate, up); }

    // The activation before anything is stored, unless a row's adapter has still to be added.
    void gated(const Rows& x, int64_t rows, const Packed& w, int64_t item, const float* bias, AtHand more, const Rows& to,
               const std::vector<Run>& runs) const {
        alignas(64) float sums[PANEL * GROUP];
        auto place = [&](int64_t row, int64_t count, int64_t g) {
            const bool kept = &runs == &runs_ && stored_[row / PANEL];
            const Quarters there = kept ? Quarters(gate_up_, row, w, g) : Quarters(sums);
            if (kept) there.expect(count);
            for (int64_t i = row; i < row + count; i++) __builtin_prefetch(to.at(i, g / 2), 1);
            return there;
        };
        auto take = [&](int64_t row, int64_t count, int64_t g, const Quarters& c) {
            each_run(runs, row, count, [&](const Run& run, int64_t first, int64_t last) {
                for (int64_t i = first; i < last && !run.few(); i++)
                    to.put(i, g * 16, activated(load(c.at(i - row, 0)), load(c.at(i - row, 1))));
            });
        };
        multiply_item(x, rows, w, item, bias, more, place, take);
    }

    const bf16* first_of(const Update& u, int64_t layer, int64_t output) const {  // of B
        return b_->lora->module[u.module].page_of_b(u.page[0], layer) + output;
    }

    void expand(Input input, int64_t item, int64_t layer, const Sums& y) {
        const std::vector<Expand>& items = plan_->expand[input];
        const Expand &e = items[item], &then = items[std::min<size_t>(item + 1, items.size() - 1)];
        const Update& u = plan_->updates[e.update];
        int64_t output = e.first;  // k and v lie beside q
        for (int64_t module = 0; module < u.module && u.module < 3; module++) output += b_->lora->module[module].out;
        expand_few(u, b_->lora->module[u.module], layer, e.first, e.count, shrunk_.floats, y, output,
                   first_of(plan_->updates[then.update], layer, then.first));
    }

    void expand_gated(const DecoderLayer& l, int64_t item, int64_t layer) {
        const Run& run = runs_[few_[item / gate_blocks(l)]];
        const int64_t inner = l.down->k, first = item % gate_blocks(l) * gate_width(l);
        const int64_t count = std::min(gate_width(l), inner - first);
        const Rows to = inner_.of_width(inner);
        const int64_t both[] = {run.update[4], run.update[5]};
        for (int half = 0; half < 2; half++)
            if (both[half] >= 0) {
                const Update& u = plan_->updates[both[half]];
                const bf16* after = half || both[1] < 0 ? nullptr : first_of(plan_->updates[both[1]], layer, first);
                expand_few(u, b_->lora->module[u.module], layer, first, count, shrunk_.floats, gate_up_,
                           half * inner + first, after);
            }
        for (int64_t row = run.row; row < run.row + run.rows; row++)
            for (int64_t c = first; c < first + count; c += 16)
                to.put(row, c, activated(load(gate_up_.at(row, c)), load(gate_up_.at(row, inner + c))));
    }

    // A head of q or k, of which there are `heads` from `first` on: its norm, if it has one, the rotation, if the layer has one,
    // and rounding.
    void rotate(const DecoderLayer& l, int64_t token, int64_t head, int64_t first, int64_t heads, const float* norm,
                bf16* to) const {
        const int64_t half = l.cos ? m_.turned / 2 : 0, position = b_->positions[token];
        const float *cos = l.cos + position * half, *sin = l.sin + position * half, *x = qkv_.at(token, head * m_.dim);
        const float* normed = l.whole_norms ? qkv_.at(token, first * m_.dim) : x;
        const int64_t wide = l.whole_norms ? heads * m_.dim : m_.dim;
        const Vec scale = splat(norm ? inverse_rms(normed, wide, m_.eps, Sums::NEXT) : 1.0f);
        if (norm && l.whole_norms) norm += (head - first) * m_.dim;
        auto part = [&](int64_t d) {
            const Vec v = load(x + d / 16 * Sums::NEXT);
            return norm ? v * scale * load(norm + d) : v;
        };
        for (int64_t d = 0; d < half; d += LANES) {
            const Vec first = part(d), second = part(half + d);
            put(to + d, (first * load(cos + d) - second * load(sin + d)));
            put(to + half + d, (second * load(cos + d) + first * load(sin + d)));
        }
        for (int64_t d = 2 * half; d < m_.dim; d += LANES) put(to + d, part(d));
    }

    int64_t element() const { return b_->int8 ? 1 : sizeof(bf16); }                       // bytes
    int64_t cache_row() const { return b_->int8 ? m_.dim + SCALE_BYTES : m_.dim; }  // elements
    char* keys(int64_t layer) const { return b_->cache + layer * b_->layer_stride * element(); }

    void append_head(const DecoderLayer& l, int64_t layer, int64_t token, int64_t head) {
        const int64_t index = b_->write_index[token];
        const int64_t at = index / b_->page_size * b_->page_stride + (head * b_->page_size + index % b_->page_size) * cache_row();
        char* key_to = keys(layer) + at * element();
        char* value_to = key_to + b_->value_offset * element();
        bf16 rounded[2][MOST_IN_INT8];
        bf16* key = b_->int8 ? rounded[0] : (bf16*)key_to;
        bf16* value = b_->int8 ? rounded[1] : (bf16*)value_to;
        rotate(l, token, m_.heads + head, m_.heads, m_.kv_heads, l.k_norm, key);
        const float* v = qkv_.at(token, (m_.heads + m_.kv_heads + head) * m_.dim);
        for (int64_t d = 0; d < m_.dim; d += 32, v += 2 * Sums::NEXT) put(value + d, load(v), load(v + Sums::NEXT));
        if (b_->int8) {
            quantize_row(key, m_.dim, key_to);
            quantize_row(value, m_.dim, value_to);
        }
    }

    void append(const DecoderLayer& l, int64_t layer, int64_t token) {
        for (int64_t head = 0; head < m_.kv_heads; head++) append_head(l, layer, token, head);
    }

    Pages pages(int64_t layer, int64_t row) const {
        const char* at = keys(layer);
        return {(const bf16*)at, (const bf16*)(at + b_->value_offset * element()), b_->page_table + row * b_->max_pages,
                b_->page_size, b_->page_stride, m_.dim, cache_row(), b_->int8 != 0};
    }

    void attend(const DecoderLayer& l, int64_t layer, int64_t item, AttentionScratch& s) {
        const Queries& q = queries_[item];
        Block after;
        if (item + 1 < int64_t(queries_.size()) && !l.window) {
            const Queries& next = queries_[item + 1];
            after = Block(pages(layer, next.row), next.head, 0, b_->kv_length[next.row]);
        }
        const int64_t group = m_.heads / m_.kv_heads, start = b_->query_start[q.row] + q.first;
        const int64_t length = b_->kv_length[q.row], vectors = q.count * group;
        const int64_t position = length - (b_->query_start[q.row + 1] - b_->query_start[q.row]) + q.first;
        if (!several_) append_head(l, layer, start, q.head);  // nobody else needs this key
        for (int64_t m = 0; m < vectors; m++)
            rotate(l, start + m / group, q.head * group + m % group, 0, m_.heads, l.q_norm, s.queries.data() + m * m_.dim);
        attend_bf16(pages(layer, q.row), q.head, group, vectors, position, length, m_.scale, l.window,
                    l.sinks ? l.sinks + q.head * group : nullptr, after, s);
        for (int64_t m = 0; m < vectors; m++)
            for (int64_t d = 0; d < m_.dim; d += LANES)
                mixed_.put(start + m / group, (q.head * group + m % group) * m_.dim + d,
                           load(s.mixed.data() + m * m_.dim + d));
    }

    const DecoderShape m_;
    const std::vector<DecoderLayer> layers_;
    // Weights that rows meet there.
    std::vector<Kept> after_norms_, after_attention_, after_gates_, to_experts_, after_experts_gates_;
    const std::vector<Run> without_adapters_{LoraPlan::plain(0, INT64_MAX)};
    Team& team_;
    std::vector<Scratch> scratch_;  // by thread
    // Of the step in hand.
    const DecoderBatch* b_ = nullptr;
    RankSums ranks_;
    std::unique_ptr<LoraPlan> plan_;
    std::vector<Run> runs_;
    std::vector<int64_t> few_;  // which of them have few rows of an adapter
    std::vector<bool> stored_;  // panels with rows of such runs, whose gate and up are stored
    std::vector<Queries> queries_;
    bool several_ = false;  // a row has more than one token: all keys are written before anyone attends
    std::vector<Phase> phases_;
    std::vector<int64_t> sizes_;
    std::vector<Team::Reads> reads_;
    const float* head_from_ = nullptr;
    float* head_to_ = nullptr;
    int64_t head_count_ = 0;
    Needed head_;
    // [rows][...], kept from step to step.
    int64_t capacity_ = 0;
    std::vector<float> residual_, output_memory_, qkv_memory_, gate_up_memory_;
    Sums output_{}, qkv_{}, gate_up_{};
    Shrunk shrunk_;
    Shrunk::Memory shrunk_memory_;
    Rows::Memory normed_memory_, mixed_memory_, inner_memory_;
    Rows normed_, mixed_, inner_;
    // Of the layer in hand, if it has experts. Rows by expert have places, see Routed.
    std::atomic<int64_t> unrouted_{0};  // blocks of rows
    Routed routed_;
    std::vector<Mlp> mlps_;
    std::vector<float> scores_memory_, experts_output_memory_;
    Sums scores_{}, experts_output_{};
    Rows::Memory by_expert_memory_, experts_inner_memory_;
    Rows by_expert_, experts_inner_;
};

}  // namespace
