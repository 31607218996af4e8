// SGMV in bfloat16: the low-rank updates of a step's adapters, cut into items that run among the base's products.
//
// Shrink: t = x A^T, a page of 8 ranks and two rows at a time, float32. Expand: y += t B, B widened to float32, so
// nothing is lost between. A row's sums run over the inputs and over the ranks in their order, whoever else is there.
#pragma once
#include <vector>

#include "packed.h"

namespace {

constexpr int64_t RANKS = 8;   // ranks of a page; those past an adapter's own are zero
constexpr int64_t WIDE = 512;  // outputs per item of expand where few adapters have to be shared out
constexpr int64_t SHRINK_AHEAD = 2048;  // bytes

struct LoraModule {  // one of q, k, v, o, gate, up, down, in all layers
    const bf16 *a, *b;
    int64_t a_layer, b_layer;  // elements between layers
    const int32_t *rank, *pages;
    int64_t max_pages, in, out;
};

struct Lora {
    const int32_t *first_row, *rows, *adapter;
    int64_t segments;
    LoraModule module[7];
};

enum Input { QKV, O, GATE_UP, DOWN, INPUTS };
constexpr int FIRST_MODULE[] = {0, 3, 4, 6, 7};

struct Update {  // one adapter's module in this step
    int64_t module, row, rows, pages, shrunk;  // shrunk: where its t [rows][pages * 8] begins
    const int32_t* page;
};

struct Piece {  // an item: pages from `first` on (shrink) or outputs (expand) of an update
    int64_t update, first, count;
};

// The items of one step, the same in every layer.
struct LoraPlan {
    std::vector<Update> updates;
    std::vector<Piece> shrink[INPUTS], expand[INPUTS];
    int64_t size = 0;  // floats of t

    // Many adapters: each is an item, its B read from end to end. Their number is of no consequence to the bits.
    static bool many(const Lora& lora, int threads) { return lora.segments >= 4 * threads; }

    LoraPlan(const Lora& lora, int threads) {
        for (int input = 0; input < INPUTS; input++)
            for (int64_t i = 0; i < lora.segments; i++)
                for (int module = FIRST_MODULE[input]; module < FIRST_MODULE[input + 1]; module++) {
                    const LoraModule& m = lora.module[module];
                    const int32_t slot = lora.adapter[i];
                    const int64_t pages = (m.rank[slot] + RANKS - 1) / RANKS, id = int64_t(updates.size());
                    if (!pages || !lora.rows[i]) continue;
                    updates.push_back(
                        {module, lora.first_row[i], lora.rows[i], pages, size, m.pages + slot * m.max_pages});
                    size += lora.rows[i] * pages * RANKS;
                    for (int64_t p = 0; p < pages; p += 2) shrink[input].push_back({id, p, std::min<int64_t>(2, pages - p)});
                    const int64_t wide = many(lora, threads) && lora.rows[i] <= 8 ? m.out : WIDE;
                    for (int64_t c = 0; c < m.out; c += wide)
                        expand[input].push_back({id, c, std::min(wide, m.out - c)});
                }
    }
};

// A page of `size` elements is read from end to end, `next` after it (null: nothing); what will be read soon is
// prefetched, which the processor does by itself only within a page of memory.
struct Stream {
    const bf16 *page, *next;
    int64_t size;

    void prefetch(int64_t at) const {
        at += SHRINK_AHEAD / int64_t(sizeof(bf16));
        if (at < size)
            _mm_prefetch((const char*)(page + at), _MM_HINT_T0);
        else if (next)
            _mm_prefetch((const char*)(next + at - size), _MM_HINT_T0);
    }
};

// t[i][0..8) = R rows times the 8 rows of A on one page. A sum is four of every fourth 32 inputs.
template <int R>
void shrink_page(const bf16* const* x, const Stream& a, int64_t in, float* const* t) {
    for (int64_t r = 0; r < RANKS; r++) {
        __m512 sum[R][4];
        for (int i = 0; i < R; i++)
            for (int part = 0; part < 4; part++) sum[i][part] = _mm512_setzero_ps();
        auto product = [&](int64_t d, int part) {
            a.prefetch(r * in + d);
            const __m512bh as = pairs_at(a.page + r * in + d);
            for (int i = 0; i < R; i++)
                sum[i][part] = _mm512_dpbf16_ps(sum[i][part], pairs_at(x[i] + d / 32 * TILE), as);
        };
        int64_t d = 0;
        for (; d + 128 <= in; d += 128)
            for (int part = 0; part < 4; part++) product(d + part * 32, part);
        for (int part = 0; d < in; d += 32, part++) product(d, part);
        for (int i = 0; i < R; i++)
            t[i][r] = _mm512_reduce_add_ps(
                _mm512_add_ps(_mm512_add_ps(sum[i][0], sum[i][1]), _mm512_add_ps(sum[i][2], sum[i][3])));
    }
}

inline const bf16* page_of_a(const Lora& lora, const Update& u, int64_t p, int64_t layer) {
    const LoraModule& m = lora.module[u.module];
    return m.a + layer * m.a_layer + u.page[p] * RANKS * m.in;
}

inline void shrink_piece(const Lora& lora, const LoraPlan& plan, Input input, int64_t item, int64_t layer,
                         const Rows& x, float* t) {
    const std::vector<Piece>& pieces = plan.shrink[input];
    const Piece& piece = pieces[item];
    const Update& u = plan.updates[piece.update];
    const int64_t in = lora.module[u.module].in, stride = u.pages * RANKS;
    for (int64_t p = piece.first; p < piece.first + piece.count; p++) {
        const bf16 *a = page_of_a(lora, u, p, layer), *next = nullptr;
        if (p + 1 < piece.first + piece.count)
            next = page_of_a(lora, u, p + 1, layer);
        else if (item + 1 < int64_t(pieces.size()))
            next = page_of_a(lora, plan.updates[pieces[item + 1].update], pieces[item + 1].first, layer);
        float* to = t + u.shrunk + p * RANKS;
        for (int64_t row = 0; row < u.rows; row += 2) {
            const int64_t second = std::min(row + 1, u.rows - 1);
            const bf16* rows[] = {x.at(u.row + row, 0), x.at(u.row + second, 0)};
            float* sums[] = {to + row * stride, to + second * stride};
            (second == row ? shrink_page<1> : shrink_page<2>)(rows, {a, row ? nullptr : next, RANKS * in}, in, sums);
        }
    }
}

// y [R rows][outputs first to first + count] += t B, four ranks after four ranks: B is read as it lies, and y from
// and to the cache a quarter as often as B has rows. `after` is what will be read next (null: nothing known).
template <int R>
void expand_rows(const Update& u, const LoraModule& m, const bf16* b, int64_t first, int64_t count, const float* t,
                 float* y, int64_t y_stride, const bf16* after) {
    constexpr int64_t FOUR = RANKS / 2;
    const int64_t stride = u.pages * RANKS;
    auto row_of_b = [&](int64_t r) { return b + (u.page[r / RANKS] * RANKS + r % RANKS) * m.out + first; };
    for (int64_t r = 0; r < stride; r += FOUR, t += FOUR) {
        const bf16 *row = row_of_b(r), *next = r + FOUR < stride ? row_of_b(r + FOUR) : after;
        for (int64_t c = 0; c < count; c += LANES) {
            if (next && c % 32 == 0)
                for (int64_t k = 0; k < FOUR; k++) _mm_prefetch((const char*)(next + k * m.out + c), _MM_HINT_T0);
            Vec bs[FOUR];
            for (int64_t k = 0; k < FOUR; k++) bs[k] = load(row + k * m.out + c);
            for (int i = 0; i < R; i++) {
                float* to = y + i * y_stride + first + c;
                Vec sum = load(to);
                for (int64_t k = 0; k < FOUR; k++) sum += t[i * stride + k] * bs[k];
                store(to, sum);
            }
        }
    }
}

// y points at the module's outputs of the step's first row. Outputs come in sixteens. `then`, from output `then_first`
// on, is what this thread will likely expand next; null: nothing.
inline void expand_piece(const Lora& lora, const Update& u, int64_t first, int64_t count, int64_t layer,
                         const float* t, float* y, int64_t y_stride, const Update* then, int64_t then_first) {
    const LoraModule& m = lora.module[u.module];
    const bf16* after = nullptr;
    if (then) {
        const LoraModule& n = lora.module[then->module];
        after = n.b + layer * n.b_layer + then->page[0] * RANKS * n.out + then_first;
    }
    for (int64_t row = 0; row < u.rows;) {
        const int64_t left = u.rows - row, n = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        (n == 8 ? expand_rows<8> : n == 4 ? expand_rows<4> : n == 2 ? expand_rows<2> : expand_rows<1>)(
            u, m, m.b + layer * m.b_layer, first, count, t + u.shrunk + row * u.pages * RANKS,
            y + (u.row + row) * y_stride, y_stride, n == left ? after : nullptr);
        row += n;
    }
}

}  // namespace
