// y += t B. Few rows of an adapter: y was stored, and B is read from end to end. Many: B becomes tiles, 16 outputs
// after 16, and the product of t and them is added to the base's while that is still in its tiles.
#pragma once
#include <type_traits>

#include "lowrank.h"

namespace {

// Weights of 16 outputs, widened before; or of 32: where registers are wide the even ones and the odd ones, which takes half as
// many instructions as their order would.
inline void widen_outputs(const float* b, Vec (&w)[1]) { w[0] = load(b); }
inline void widen_outputs(const bf16* b, Vec (&w)[2]) {
#if defined(WIDE_REGISTERS)
    const IVec both = load_words(b);
    w[0] = evens(both), w[1] = odds(both);
#else
    w[0] = load(b), w[1] = load(b + LANES);
#endif
}

// Outputs of R rows, N times 16 of them, += t B of one page; a row's t is 32 floats after that of the row before.
template <int R, int N, typename T>
void expand_page(const T* b, int64_t out, const float* t, Vec (&y)[R][N]) {
    Vec sum[2][R][N] = {};  // of even ranks and of odd ones
    each<RANKS>([&](auto k) ALWAYS_INLINE {
        Vec w[N];
        widen_outputs(b + k * out, w);
        each<R>([&](auto i) ALWAYS_INLINE {
            each<N>([&](auto n) ALWAYS_INLINE { sum[k % 2][i][n] = fma(splat(t[i * 32 + k]), w[n], sum[k % 2][i][n]); });
        });
    });
    each<R>([&](auto i) ALWAYS_INLINE {
        each<N>([&](auto n) ALWAYS_INLINE { y[i][n] = y[i][n] + (sum[0][i][n] + sum[1][i][n]); });
    });
}

// 32 outputs of a row of Sums, as `widen_outputs` has them.
#if defined(WIDE_REGISTERS)
inline void load_apart(const float* y, Vec (&sums)[2]) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 low = _mm512_load_ps(y), high = _mm512_load_ps(y + Sums::NEXT);
    sums[0] = (Vec)_mm512_permutex2var_ps(low, even, high), sums[1] = (Vec)_mm512_permutex2var_ps(low, odd, high);
}
inline void store_together(float* y, const Vec (&sums)[2]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    _mm512_store_ps(y, _mm512_permutex2var_ps((__m512)sums[0], low, (__m512)sums[1]));
    _mm512_store_ps(y + Sums::NEXT, _mm512_permutex2var_ps((__m512)sums[0], high, (__m512)sums[1]));
}
#else
inline void load_apart(const float* y, Vec (&sums)[2]) { sums[0] = load(y), sums[1] = load(y + Sums::NEXT); }
inline void store_together(float* y, const Vec (&sums)[2]) { store(y, sums[0]), store(y + Sums::NEXT, sums[1]); }
#endif

// Outputs `first` to `first + count`, a multiple of 32, of R rows += t B, in y from `output` on. `after` is what will be read
// next (null: nothing known).
template <int R>
void expand_rows(const Update& u, const LoraModule& m, int64_t layer, int64_t row, int64_t first, int64_t count,
                 const float* t, const Sums& y, int64_t output, const bf16* after) {
    auto b = [&](int64_t p) { return m.page_of_b(u.page[p], layer) + first; };
    float* of_row[R];
    for (int i = 0; i < R; i++) of_row[i] = y.at(row + i, output);
    for (int64_t p = 0; p < u.pages; p++) {
        const bf16* next = p + 1 < u.pages ? b(p + 1) : after;
        for (int64_t c = 0; c < count; c += 2 * LANES) {
            for (int64_t k = 0; k < RANKS && next; k++) __builtin_prefetch(next + k * m.out + c);
            Vec sums[R][2];
            for (int i = 0; i < R; i++) load_apart(of_row[i] + c / 16 * Sums::NEXT, sums[i]);
            expand_page(b(p) + c, m.out, t + u.at(row, p), sums);
            for (int i = 0; i < R; i++) store_together(of_row[i] + c / 16 * Sums::NEXT, sums[i]);
        }
    }
}

// Calls visit(R, done) for rows in groups of R, a constant: 8 while there are so many, then 4, 2 and 1. (A loop that chose one
// of four functions and went on by as many rows was miscompiled by GCC 12.)
template <typename Visit>
void in_groups(int64_t rows, Visit visit) {
    int64_t done = 0;
    for (; done + 8 <= rows; done += 8) visit(std::integral_constant<int, 8>(), done);
    if (rows & 4) visit(std::integral_constant<int, 4>(), done), done += 4;
    if (rows & 2) visit(std::integral_constant<int, 2>(), done), done += 2;
    if (rows & 1) visit(std::integral_constant<int, 1>(), done);
}

// The same for all rows of an update.
inline void expand_few(const Update& u, const LoraModule& m, int64_t layer, int64_t first, int64_t count, const float* t,
                       const Sums& y, int64_t output, const bf16* after) {
    in_groups(u.rows, [&](auto R, int64_t done) {
        const bool last = done + R == u.rows;
        expand_rows<R>(u, m, layer, u.row + done, first, count, t, y, output, last ? after : nullptr);
    });
}

// 16 outputs of R rows += t B; B is [ranks][16].
template <int R>
void expand_sixteen(const Update& u, const float* b, int64_t row, const float* t, float* y) {
    Vec sums[R][1];
    for (int i = 0; i < R; i++) sums[i][0] = load(y + i * 16);
    for (int64_t p = 0; p < u.pages; p++) expand_page(b + p * RANKS * 16, 16, t + u.at(row, p), sums);
    for (int i = 0; i < R; i++) store(y + i * 16, sums[i][0]);
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
#if defined(WIDE_REGISTERS)
        if (instructions() != TILES || w.kept != BFLOAT16) return;
        b_ = scratch_.tiles(tiles * TILE);
        for (const Part& part : parts_) weave(part);
#endif
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
            if (first >= last) continue;
            const float* b = widen(part);
            for (int64_t of = first, end; of < last; of = end) {
                end = std::min(last, row + (of - row) / 16 * 16 + 16);  // of a tile
                in_groups(end - of, [&](auto R, int64_t done) {
                    expand_sixteen<R>(u, b, of + done, t_.floats, c.at(of + done - row, part.half));
                });
            }
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

    // 16 outputs of all ranks as floats.
    const float* widen(const Part& part) const {
        const Update& u = *part.update;
        const LoraModule& m = lora_->module[u.module];
        float *const to = scratch_.floats(u.pages * RANKS * 16), *at = to;
        for (int64_t p = 0; p < u.pages; p++) {
            const bf16* b = m.page_of_b(u.page[p], layer_) + part.first;
            for (int64_t k = 0; k < RANKS; k++, b += m.out, at += 16) {
                __builtin_prefetch(b + 32);
                store(at, load(b));
            }
        }
        return to;
    }

#if defined(WIDE_REGISTERS)
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
#endif

    const Lora* lora_;
    const LoraPlan* plan_;
    const Input input_;
    const int64_t layer_;
    const Shrunk& t_;
    LoraScratch& scratch_;
    std::vector<Part> parts_;
#if defined(WIDE_REGISTERS)
    bf16* b_ = nullptr;
#endif
};

}  // namespace
