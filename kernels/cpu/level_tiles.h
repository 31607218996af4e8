// AMX for weights in few bits: the same sums of whole numbers, of sixteen rows, sixteen outputs and a block of inputs at once. Scales are
// applied after, as vectors do it and in the same order, so the bits are the same.
#pragma once
#include "levels.h"
#include "tiles.h"

namespace {

#if defined(__AMX_INT8__) && defined(__AMX_TILE__)
// Some blocks of a group, as tiles are read; of 8 bits they are where the weights lie. All rows of a panel meet them, then the next.
template <Kept KEPT>
struct LevelTiles {
    static constexpr Layout L = layout_of(KEPT);
    static constexpr int64_t BLOCKS = L.super_bytes ? TOGETHER_K : CHUNK;

    alignas(64) int8_t levels[2][BLOCKS][8][64];
    float scales[2][BLOCKS][LANES], least[2][BLOCKS][LANES];
    const char* lines[BLOCKS];

    void read(const LevelsChunk& chunk, const LevelsGroup& group) {
        using Read = Reader<KEPT>;
        const Table table = Read::table();
        int64_t at = chunk.at, super_at = at;
        for (int64_t b = chunk.first, i = 0; b < chunk.last; b++, i++, at += L.block_bytes()) {
            if (L.super_bytes && b % TOGETHER_K == 0) super_at = at, at += L.super_bytes;
            const char *block = group.blocks + at, *super = group.blocks + super_at;
            lines[i] = block + L.scale_bytes;
            for (int64_t line = 0; line < L.block_bytes(); line += 64) __builtin_prefetch(block + line + NEAR);
            each<2>([&](auto half) ALWAYS_INLINE {
                each<L.bits == 8 ? 0 : 8>([&](auto word) ALWAYS_INLINE {
                    constexpr int W = Read::WORDS;
                    const std::integral_constant<int, decltype(word)::value % W> place;
                    const IVec given = Read::levels(lines[i] + half * L.half_bytes(), word / W, place, table);
                    _mm512_store_si512(levels[half][i][word], _mm512_sub_epi8((__m512i)given, _mm512_set1_epi8(L.zero)));
                });
                if (KEPT != INT8) store(scales[half][i], Read::scale(super, block, half, 0));
                if (L.least) store(least[half][i], Read::least(super, block, half));
            });
        }
    }
    const void* tile(int64_t half, int64_t i) const {
        return L.bits == 8 ? (const void*)(lines[i] + half * L.half_bytes()) : levels[half][i];
    }
};

// Sixteen rows: c += x times the chunk's 16 outputs.
template <Kept KEPT>
void multiply_sixteen(const WholeRows& x, const LevelsChunk& chunk, const LevelTiles<KEPT>& w, int64_t half, float* c) {
    alignas(64) int32_t sums[LevelTiles<KEPT>::BLOCKS][16][LANES];
    const int64_t blocks = chunk.last - chunk.first;
    for (int64_t i = 0; i < blocks; i++) {
        _tile_zero(0);
        _tile_loadd(4, x.numbers + (chunk.first + i) * TILE, 32);
        _tile_loadd(6, w.tile(half, i), 64);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums[i], 64);
    }
    Vec total[16];
    each<16>([&](auto r) ALWAYS_INLINE { total[r] = load(c + r * LANES); });
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t at = (chunk.first + i) * 16;
        const Vec scale = KEPT == INT8 ? Vec{} : load(w.scales[half][i]);
        each<16>([&](auto r) ALWAYS_INLINE {
            const Vec of_row = splat(x.scales[at + r]);
            total[r] = fma(floats(load_words(sums[i][r])), KEPT == INT8 ? of_row : scale * of_row, total[r]);
        });
        if (layout_of(KEPT).least) {
            const Vec least = load(w.least[half][i]);
            each<16>([&](auto r) ALWAYS_INLINE { total[r] = fma(least, splat(x.totals[at + r]), total[r]); });
        }
    }
    each<16>([&](auto r) ALWAYS_INLINE { store(c + r * LANES, total[r]); });
}

// Of a panel's rows the whole sixteens: c = x times a group, plus the bias. How many rows they are.
template <Kept KEPT>
int64_t multiply_sixteens(const WholeRows& x, int64_t rows, const Packed& w, int64_t g, const LevelsGroup& group) {
    static thread_local LevelTiles<KEPT> tiles;
    const int64_t sixteens = rows / 16;
    for (int64_t i = 0; i < sixteens * 2; i++)
        for (int64_t r = 0; r < 16; r++)
            store(group.c.tile[i] + r * 16, layout_of(KEPT).scaled ? Vec{} : load(group.bias.half[i % 2]));
    for (int64_t first = 0; first < x.blocks && sixteens; first += tiles.BLOCKS) {
        const LevelsChunk chunk(w, g, first, tiles.BLOCKS, 0, tiles.L);
        tiles.read(chunk, group);
        for (int64_t half = 0; half < 2; half++)
            for (int64_t i = 0; i < sixteens; i++)
                multiply_sixteen<KEPT>(x.from(i * 16), chunk, tiles, half, group.c.tile[i * 2 + half]);
    }
    for (int64_t i = 0; i < sixteens * 2 && layout_of(KEPT).scaled; i++)
        for (int64_t r = 0; r < 16; r++) {
            float* c = group.c.tile[i] + r * 16;
            store(c, fma(load(c), load(group.scales + i % 2 * 16), load(group.bias.half[i % 2])));
        }
    return sixteens * 16;
}
// Where a block has two scales, tiles gain little.
template <Kept KEPT>
bool tiled() {
    return layout_of(KEPT).per_scale == 32 && instructions() == TILES;
}
#else
template <Kept KEPT>
constexpr bool tiled() { return false; }
template <Kept KEPT>
int64_t multiply_sixteens(const WholeRows&, int64_t, const Packed&, int64_t, const LevelsGroup&) { return 0; }
#endif

}  // namespace
