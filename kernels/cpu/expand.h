// y += t B. Few rows of an adapter: y was stored, and B is read from end to end. Many: B becomes tiles, 16 outputs
// after 16, and the product of t and them is added to the base's while that is still in its tiles.
#pragma once
#include "lowrank.h"

namespace {

// 16 outputs of R rows += t B of one page; a row's t is 32 floats after that of the row before.
template <int R>
void expand_page(const bf16* b, int64_t out, const float* t, __m512 (&y)[R]) {
    __m512 bs[RANKS];
    for (int64_t k = 0; k < RANKS; k++) bs[k] = (__m512)load(b + k * out);
    for (int i = 0; i < R; i++) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int64_t k = 0; k < RANKS; k += 2) {
            even = _mm512_fmadd_ps(_mm512_set1_ps(t[i * 32 + k]), bs[k], even);
            odd = _mm512_fmadd_ps(_mm512_set1_ps(t[i * 32 + k + 1]), bs[k + 1], odd);
        }
        y[i] = _mm512_add_ps(y[i], _mm512_add_ps(even, odd));
    }
}

// Outputs `first` to `first + count` of R rows += t B; y points at the first of each row, of Sums. `after` is what
// will be read next (null: nothing known).
template <int R>
void expand_rows(const Update& u, const LoraModule& m, int64_t layer, int64_t row, int64_t first, int64_t count,
                 const float* t, float* const* y, const bf16* after) {
    auto b = [&](int64_t p) { return m.page_of_b(u.page[p], layer) + first; };
    __m512 sums[R];
    auto load_sums = [&](int64_t c) {
        for (int i = 0; i < R; i++) sums[i] = _mm512_load_ps(y[i] + c / 16 * Sums::NEXT);
    };
    auto store_sums = [&](int64_t c) {
        for (int i = 0; i < R; i++) _mm512_store_ps(y[i] + c / 16 * Sums::NEXT, sums[i]);
    };
    if (count == LANES) {
        load_sums(0);
        for (int64_t p = 0; p < u.pages; p++) expand_page<R>(b(p), m.out, t + u.at(row, p), sums);
        return store_sums(0);
    }
    for (int64_t p = 0; p < u.pages; p++) {
        const bf16* next = p + 1 < u.pages ? b(p + 1) : after;
        for (int64_t c = 0; c < count; c += LANES) {
            if (next && c % 32 == 0)
                for (int64_t k = 0; k < RANKS; k++) _mm_prefetch((const char*)(next + k * m.out + c), _MM_HINT_T0);
            load_sums(c);
            expand_page<R>(b(p) + c, m.out, t + u.at(row, p), sums);
            store_sums(c);
        }
    }
}

// Rows `row` to `row + rows` of an update's own; y(row) points at output `first` of a row. Outputs come in sixteens.
template <typename Y>
void expand_few(const Update& u, const LoraModule& m, int64_t layer, int64_t row, int64_t rows, int64_t first,
                int64_t count, const float* t, Y y, const bf16* after) {
    while (rows) {
        const int64_t n = rows >= 8 ? 8 : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
        float* of_rows[8];
        for (int64_t i = 0; i < n; i++) of_rows[i] = y(row + i);
        (n == 8   ? expand_rows<8>
         : n == 4 ? expand_rows<4>
         : n == 2 ? expand_rows<2>
                  : expand_rows<1>)(u, m, layer, row, first, count, t, of_rows, n == rows ? after : nullptr);
        row += n, rows -= n;
    }
}

// What adapters of many rows add to a product of the base, for `multiply` to call.
class AtHand {
   public:
    AtHand(const Lora* lora, const LoraPlan* plan, Input input, int64_t layer, const Shrunk& t, LoraScratch& scratch)
        : lora_(lora), plan_(plan && plan->at_hand ? plan : nullptr), input_(input), layer_(layer), t_(t),
          scratch_(scratch) {}

    // The next products are of group g.
    void begin(const Packed& w, int64_t g) {
        if (!plan_) return;
        parts_.clear();
        int64_t tiles = 0;
        for (const Run& run : plan_->runs)
            for (int64_t half = 0; half < 2 && !run.few(); half++) {
                const auto [module, first] = output(w, g, half);
                if (run.update[module] < 0) continue;
                const Update& u = plan_->updates[run.update[module]];
                parts_.push_back({&u, half, first, tiles});
                tiles += u.pages;
            }
        if (instructions() != TILES) return;
        b_ = scratch_.tiles(tiles * TILE);
        for (const Part& part : parts_) weave(part);
    }

    bool any() const { return !parts_.empty(); }  // something is added to this group

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
    // The sums of rows `row` to `row + count` are in tiles 0 and 1 (the first 16 rows), 2 and 3.
    void add_tiles(int64_t row, int64_t count) const {
        if (!plan_) return;
        for (const Part& part : parts_) {
            const Update& u = *part.update;
            const int64_t from = row - u.first(), tall = u.tall();
            const bool top = from >= 0 && from < tall, bottom = count > 16 && from + 16 >= 0 && from + 16 < tall;
            if (!top && !bottom) continue;
            const bf16 *t = t_.tiles + u.shrunk + from * 32, *b = b_ + part.tiles * TILE;
            for (int64_t p = 0; p < u.pages; p++, b += TILE) {
                if (p % QUAD == 0) {
                    if (top) _tile_loadd(4, t + p / QUAD * tall * 32, 64);
                    if (bottom) _tile_loadd(5, t + (p / QUAD * tall + 16) * 32, 64);
                }
                _tile_loadd(6, b, 64);
                if (part.half == 0) {
                    if (top) _tile_dpbf16ps(0, 4, 6);
                    if (bottom) _tile_dpbf16ps(2, 5, 6);
                } else {
                    if (top) _tile_dpbf16ps(1, 4, 6);
                    if (bottom) _tile_dpbf16ps(3, 5, 6);
                }
            }
        }
    }
#else
    void add_tiles(int64_t, int64_t) const {}
#endif

    // The same without AMX.
    void add(int64_t row, int64_t count, const Quarters& c) const {
        if (!plan_) return;
        for (const Part& part : parts_) {
            const Update& u = *part.update;
            const int64_t first = std::max(row, u.row), last = std::min(row + count, u.row + u.rows);
            if (first < last)
                expand_few(u, lora_->module[u.module], layer_, first, last - first, part.first, 16, t_.floats,
                           [&](int64_t of) { return c.at(of - row, part.half); }, nullptr);
        }
    }

   private:
    struct Part {
        const Update* update;
        int64_t half, first, tiles;  // of the group, of its module's outputs, of the woven pages
    };

    // The module of half a group, and the first of its outputs.
    std::pair<int, int64_t> output(const Packed& w, int64_t g, int64_t half) const {
        int module = FIRST_MODULE[input_];
        if (w.paired) return {module + int(half), g * 16};
        int64_t column = w.column(g, half);
        for (; column >= lora_->module[module].out; module++) column -= lora_->module[module].out;
        return {module, column};
    }

    // 16 outputs of each page as a tile: pairs of ranks, at their place among the 32 that a row of t's tile holds.
    void weave(const Part& part) const {
        const Update& u = *part.update;
        const LoraModule& m = lora_->module[u.module];
        const __m512i order = _mm512_set_epi16(
            47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
            39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        auto half_line = [](const bf16* p) { return _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p)); };
        for (int64_t p = 0; p < u.pages; p++) {
            const bf16* b = m.page_of_b(u.page[p], layer_) + part.first;
            bf16* tile = b_ + (part.tiles + p) * TILE;
            for (int64_t pair = 0; pair < 16; pair++) {
                __m512i both = _mm512_setzero_si512();
                if (pair / (RANKS / 2) == p % QUAD) {
                    const bf16* even = b + pair % (RANKS / 2) * 2 * m.out;
                    _mm_prefetch((const char*)(even + 32), _MM_HINT_T0);
                    _mm_prefetch((const char*)(even + m.out + 32), _MM_HINT_T0);
                    both = _mm512_permutex2var_epi16(half_line(even), order, half_line(even + m.out));
                }
                _mm512_store_si512(tile + pair * 32, both);
            }
        }
    }

    const Lora* lora_;
    const LoraPlan* plan_;
    const Input input_;
    const int64_t layer_;
    const Shrunk& t_;
    LoraScratch& scratch_;
    std::vector<Part> parts_;
    bf16* b_ = nullptr;
};

}  // namespace
