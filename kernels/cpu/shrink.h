// t = x A^T for pages of one adapter and some rows: with tiles; with pairs, few rows or all; or many rows in floats.
//
// Rows of A are inputs side by side, as AMX wants its first operand: a page of 8 ranks is read as it lies. The rows of
// x, up to 16, become columns of the second one. So one row and sixteen cost the same, and have the same bits.
#pragma once
#include "shrink_floats.h"

namespace {

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
// N vectors of 16, the rows of a matrix, become its 16 columns, side by side: halves are riffled as cards are.
template <int N>
inline void riffle(__m512i (&v)[N]) {
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int stage = 1; stage < N; stage *= 2) {
        __m512i u[N];
        for (int i = 0; i < N / 2; i++) {
            u[2 * i] = _mm512_permutex2var_epi32(v[i], low, v[i + N / 2]);
            u[2 * i + 1] = _mm512_permutex2var_epi32(v[i], high, v[i + N / 2]);
        }
        for (int i = 0; i < N; i++) v[i] = u[i];
    }
}

// Up to N rows as columns: for each 32 inputs [16 pairs][N][2]. Past the last row it is repeated.
template <int N>
void columns_of(const Rows& x, int64_t row, int64_t rows, bf16* to) {
    const bf16* from[N];
    for (int64_t i = 0; i < N; i++) from[i] = x.at(row + std::min(i, rows - 1), 0);
    for (int64_t block = 0; block < x.blocks; block++, to += N * 32) {
        __m512i v[N];
        for (int i = 0; i < N; i++) v[i] = _mm512_loadu_si512(from[i] + block * TILE);
        riffle(v);
        for (int i = 0; i < N; i++) _mm512_storeu_si512(to + i * 32, v[i]);
    }
}

inline void begin_shrink(int64_t columns) {
    Tiles tiles;
    tiles.shape(0, RANKS, columns * 4);
    tiles.shape(4, RANKS, 64);
    tiles.shape(7, 16, columns * 4);
    tiles.load();
}

// `next` (null: nothing) is what will be read next.
inline void shrink_tiles(const bf16* a, const bf16* next, int64_t in, const bf16* x, int64_t columns, float* sums) {
    _tile_zero(0);
    for (int64_t d = 0; d < in; d += 32, x += columns * 32) {
        if (next)
            for (int64_t r = 0; r < RANKS; r++) _mm_prefetch((const char*)(next + r * in + d), _MM_HINT_T0);
        _tile_loadd(7, x, columns * 4);
        _tile_loadd(4, a + d, in * 2);
        _tile_dpbf16ps(0, 4, 7);
    }
    _tile_stored(0, sums, 64);
}

inline void put_columns(const float* sums, int64_t rows, const Shrunk& t, int64_t to) {  // sums [8 ranks][16 columns]
    alignas(64) float of_rows[16 * RANKS];
    __m512i v[RANKS];
    for (int64_t r = 0; r < RANKS; r++) v[r] = _mm512_loadu_si512(sums + r * 16);
    riffle(v);
    for (int64_t r = 0; r < RANKS; r++) _mm512_store_si512(of_rows + r * 16, v[r]);
    put_ranks(of_rows, rows, t, to);
}

inline void shrink_amx(const LoraPlan& plan, Input input, const Shrink& item, int64_t layer, int64_t in, const Rows& x,
                       const Shrunk& t, LoraScratch& scratch) {
    const int64_t columns = item.rows == 1 ? 1 : item.rows == 2 ? 2 : item.rows <= 4 ? 4 : item.rows <= 8 ? 8 : 16;
    bf16* xs = scratch.columns(x.blocks * 16 * 32);
    (columns == 1   ? columns_of<1>
     : columns == 2 ? columns_of<2>
     : columns == 4 ? columns_of<4>
     : columns == 8 ? columns_of<8>
                    : columns_of<16>)(x, item.row, item.rows, xs);
    begin_shrink(columns);
    const std::vector<RankPage>& pages = plan.pages[input];
    auto page = [&](int64_t p) { return p < int64_t(pages.size()) ? pages[p].a + layer * pages[p].layer : nullptr; };
    for (int64_t p = item.first; p < item.first + item.pages; p++) {
        alignas(64) float sums[RANKS * 16];
        shrink_tiles(page(p), page(p + 1), in, xs, columns, sums);
        put_columns(sums, item.rows, t, pages[p].to + item.skipped * 32);
    }
    end_tiles();
}
#else
inline void shrink_amx(const LoraPlan&, Input, const Shrink&, int64_t, int64_t, const Rows&, const Shrunk&, LoraScratch&) {}
#endif

// t[i][0..8) = R rows times the 8 rows of A on one page, two at a time. A sum is four of every fourth 32 inputs. Meanwhile
// `next`, a page, is asked for, which the processor does by itself only within a page of memory.
template <int R>
void shrink_page(const bf16* const* x, const bf16* a, const bf16* next, int64_t in, float* t) {
    constexpr int AT_ONCE = TOGETHER > 1 ? 4 : 1;  // of the four sums, those that fit into the registers
    for (int64_t r = 0; r < RANKS; r += 2, a += 2 * in, next += 2 * in) {
        Vec whole[2][R][4];
        for (int from = 0; from < 4; from += AT_ONCE) {
            Vec sum[2][R][AT_ONCE] = {};
            auto product = [&](int64_t d, auto part) ALWAYS_INLINE {
                each<2>([&](auto k) ALWAYS_INLINE {
                    __builtin_prefetch(next + k * in + d, 0, 2);
                    const IVec as = load_words(a + k * in + d);
                    each<R>([&](auto i) ALWAYS_INLINE {
                        sum[k][i][part] = add_pairs(sum[k][i][part], load_words(x[i] + d / 32 * TILE), as);
                    });
                });
            };
            int64_t d = from * 32;
            for (; d + AT_ONCE * 32 <= in; d += 128)
                each<AT_ONCE>([&](auto part) ALWAYS_INLINE { product(d + part * 32, part); });
            if (AT_ONCE > 1) each<AT_ONCE>([&](auto part) ALWAYS_INLINE { if (d + part * 32 < in) product(d + part * 32, part); });
            each<2>([&](auto k) ALWAYS_INLINE {
                each<R>([&](auto i) ALWAYS_INLINE {
                    each<AT_ONCE>([&](auto part) ALWAYS_INLINE { whole[k][i][from + part] = sum[k][i][part]; });
                });
            });
        }
        for (int k = 0; k < 2; k++)
            for (int i = 0; i < R; i++) {
                const Vec* s = whole[k][i];
                t[i * RANKS + r + k] = sum((s[0] + s[1]) + (s[2] + s[3]));
            }
    }
}

inline void shrink_pairs(const LoraPlan& plan, Input input, const Shrink& item, int64_t layer, int64_t in,
                          const Rows& x, const Shrunk& t) {
    const std::vector<RankPage>& pages = plan.pages[input];
    auto page = [&](int64_t p) { return pages[p].a + layer * pages[p].layer; };
    for (int64_t p = item.first; p < item.first + item.pages; p++) {
        const bf16* next = page(std::min(p + 1, int64_t(pages.size()) - 1));
        float sums[BAND * RANKS];
        for (int64_t row = 0; row < item.rows; row += 2) {
            const bool two = row + 1 < item.rows;
            const bf16* rows[] = {x.at(item.row + row, 0), x.at(item.row + row + two, 0)};
            (two ? shrink_page<2> : shrink_page<1>)(rows, page(p), row ? page(p) : next, in,
                                                    sums + row * RANKS);
        }
        put_ranks(sums, item.rows, t, pages[p].to + item.skipped * 32);
    }
}

inline void shrink(const Lora& lora, const LoraPlan& plan, Input input, int64_t item, int64_t layer, const Rows& x,
                   const Shrunk& t, LoraScratch& scratch) {
    const int64_t in = lora.module[FIRST_MODULE[input]].in;
    const Shrink& todo = plan.shrink[input][item];
    if (instructions() == TILES)
        shrink_amx(plan, input, todo, layer, in, x, t, scratch);
    else if (instructions() == PAIRS || todo.rows <= FEW)
        shrink_pairs(plan, input, todo, layer, in, x, t);
    else
        shrink_floats(plan, input, todo, layer, in, x, t, scratch);
}

}  // namespace
