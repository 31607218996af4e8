// Products of rows with packed weights, in bfloat16 with sums of float32.
//
// Each output of a row is one sum over the inputs in their order, whatever the number of rows: a row's result has
// the same bits alone and in company. (AMX and AVX-512 round differently; a machine uses one of them.) Where weights
// have scales, a sum is multiplied by its output's when it is whole.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include "widened.h"

namespace {

constexpr int64_t PANEL = 32;  // rows that share a reading of a group

inline bf16* put(bf16* to, __m512 low, __m512 high) {  // 32 floats, rounded
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    std::memcpy(to, &both, 64);
    return to;
}
inline void put(bf16* to, __m512 x) {
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    std::memcpy(to, &rounded, 32);
}

inline __m512bh pair_of(const bf16* p) {  // one pair, in all lanes
    int32_t both;
    std::memcpy(&both, p, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}
inline __m512bh pairs_at(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

template <int R, typename Source>
void multiply_rows(const bf16* x, const Source& w, int64_t blocks, bool fresh, const float* const* first,
                   float* const* c) {
    __m512 sum[R][2];
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) sum[r][half] = _mm512_loadu_ps(first[half]);
    for (int64_t block = 0; block < blocks; block++, x += TILE) {
        const bf16* tiles = w.block(block, fresh);
        for (int pair = 0; pair < 16; pair++) {
            const __m512bh w0 = pairs_at(tiles + pair * 32), w1 = pairs_at(tiles + TILE + pair * 32);
            for (int r = 0; r < R; r++) {
                const __m512bh xs = pair_of(x + r * 32 + pair * 2);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], xs, w0);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], xs, w1);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        _mm512_store_ps(c[0] + r * 16, sum[r][0]);
        _mm512_store_ps(c[1] + r * 16, sum[r][1]);
    }
}

constexpr int64_t TALL = 8;  // rows that AVX-512 has sums for

// c = x (from the row that starts a panel) times one group, plus `first`, with AVX-512. fresh: see AsTheyLie.
template <typename Source>
void multiply_avx512(const bf16* x, const Source& w, int64_t blocks, int64_t rows, bool fresh,
                     const float* const* first, const Quarters& c) {
    static void (*const few[])(const bf16*, const Source&, int64_t, bool, const float* const*, float* const*) = {
        multiply_rows<1, Source>, multiply_rows<2, Source>, multiply_rows<3, Source>, multiply_rows<4, Source>,
        multiply_rows<5, Source>, multiply_rows<6, Source>, multiply_rows<7, Source>, multiply_rows<8, Source>};
    for (int64_t row = 0; row < rows; row += TALL) {
        float* const to[] = {c.at(row, 0), c.at(row, 1)};
        few[std::min(TALL, rows - row) - 1](x + row / 16 * blocks * TILE + row % 16 * 32, w, blocks, fresh && !row,
                                            first, to);
    }
}

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
constexpr bool AMX_BUILT = true;

inline bool amx_allowed() {  // the kernel wants to be asked before a process uses tiles
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return allowed;
}

struct alignas(64) Tiles {  // their shapes; none until they are given
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void shape(int tile, int64_t of_rows, int64_t of_bytes) {
        rows[tile] = uint8_t(of_rows), bytes[tile] = uint16_t(of_bytes);
    }
    void load() const { _tile_loadconfig(this); }
};

inline void begin_tiles() {
    Tiles tiles;
    for (int tile = 0; tile < 8; tile++) tiles.shape(tile, 16, 64);
    tiles.load();
}
inline void end_tiles() { _tile_release(); }

// The sums of up to 16 rows are in tiles 0 and 1, of the next 16 in 2 and 3.
inline void load_sums(const Quarters& c, int64_t rows) {
    _tile_loadd(0, c.tile[0], 64);
    _tile_loadd(1, c.tile[1], 64);
    if (rows <= 16) return;
    _tile_loadd(2, c.tile[2], 64);
    _tile_loadd(3, c.tile[3], 64);
}
inline void store_sums(const Quarters& c, int64_t rows) {
    _tile_stored(0, c.tile[0], 64);
    _tile_stored(1, c.tile[1], 64);
    if (rows <= 16) return;
    _tile_stored(2, c.tile[2], 64);
    _tile_stored(3, c.tile[3], 64);
}

// As multiply_avx512; the sums stay in the tiles.
template <typename Source>
void multiply_amx(const bf16* x, const Source& w, int64_t blocks, int64_t rows, bool fresh, const float* const* first) {
    _tile_loadd(0, first[0], 0);  // its 16 floats in each row
    _tile_loadd(1, first[1], 0);
    if (rows <= 16) {
        for (int64_t block = 0; block < blocks; block++, x += TILE) {
            const bf16* tiles = w.block(block, fresh);
            _tile_loadd(4, x, 64);
            _tile_loadd(6, tiles, 64);
            _tile_loadd(7, tiles + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        const bf16* below = x + blocks * TILE;
        _tile_loadd(2, first[0], 0);
        _tile_loadd(3, first[1], 0);
        for (int64_t block = 0; block < blocks; block++, x += TILE, below += TILE) {
            const bf16* tiles = w.block(block, fresh);
            _tile_loadd(4, x, 64);
            _tile_loadd(5, below, 64);
            _tile_loadd(6, tiles, 64);
            _tile_loadd(7, tiles + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}
#else
constexpr bool AMX_BUILT = false;
inline bool amx_allowed() { return false; }
inline void begin_tiles() {}
inline void end_tiles() {}
inline void load_sums(const Quarters&, int64_t) {}
inline void store_sums(const Quarters&, int64_t) {}
template <typename Source>
void multiply_amx(const bf16*, const Source&, int64_t, int64_t, bool, const float* const*) {}
#endif

inline bool& amx_on() {  // switched off by tests, which want to see both
    static bool on = AMX_BUILT && amx_allowed();
    return on;
}

struct Nothing {  // what is added to a product before it is taken: see AtHand in expand.h
    void begin(const Packed&, int64_t) {}
    bool any() const { return false; }
    void add_tiles(int64_t, int64_t) const {}
    void add(int64_t, int64_t, const Quarters&) const {}
};

// Sums of integers, which are `unit` times too small, become what they are sums of.
inline void scale_sums(const Quarters& c, int64_t rows, float unit, const float* scales, const float* const* bias) {
    for (int64_t half = 0; half < 2; half++) {
        const __m512 scale = _mm512_load_ps(scales + half * 16), more = _mm512_loadu_ps(bias[half]);
        for (int64_t row = 0; row < rows; row++) {
            const __m512 sum = _mm512_mul_ps(_mm512_load_ps(c.at(row, half)), _mm512_set1_ps(unit));
            _mm512_store_ps(c.at(row, half), _mm512_fmadd_ps(sum, scale, more));
        }
    }
}

// x [rows, k] times the groups `first` to `last` of a weight, plus the bias (null: none; else readable up to the
// groups' end). place(row, count, group) says where a product goes, of `count` rows from `row` on, as Quarters; all
// rows of a tile are written. take(row, count, group, c) gets it.
template <typename Source, typename More, typename Place, typename Take>
void multiply(const Rows& x, int64_t rows, const Packed& w, int64_t first, int64_t last, const float* bias, More& more,
              Place place, Take take) {
    alignas(64) static const float none[16] = {};
    const float* nothing[] = {none, none};
    const bool amx = amx_on();
    const int64_t each = amx ? PANEL : TALL;
    Source source(w, (rows + each - 1) / each);
    if (amx) begin_tiles();
    for (int64_t g = first; g < last; g++) {
        const float* biases[] = {bias ? bias + w.column(g, 0) : none, bias ? bias + w.column(g, 1) : none};
        const float* const* start = Source::SCALED ? nothing : biases;
        source.begin(w, g);
        more.begin(w, g);
        for (int64_t row = 0; row < rows; row += PANEL) {
            const int64_t count = std::min(PANEL, rows - row);
            const bf16* panel = x.tiles + row / 16 * x.blocks * TILE;
            const Quarters c = place(row, count, g);
            if (amx) {
                multiply_amx(panel, source, w.blocks, count, row == 0, start);
                if (Source::SCALED) {
                    store_sums(c, count);
                    scale_sums(c, count, source.unit(), w.scales(g), biases);
                    if (more.any()) load_sums(c, count);
                }
                more.add_tiles(row, count);
                if (!Source::SCALED || more.any()) store_sums(c, count);
            } else {
                multiply_avx512(panel, source, w.blocks, count, row == 0, start, c);
                if (Source::SCALED) scale_sums(c, count, source.unit(), w.scales(g), biases);
                more.add(row, count, c);
            }
            take(row, count, g, c);
        }
    }
    if (amx) end_tiles();
}

// Items of work: some 96 KiB of weights each, a few microseconds' reading, and as many as two or four threads share evenly.
inline int64_t items_of(const Packed& w) {
    const int64_t each = std::max<int64_t>(1, (96 << 10) / w.tile_bytes()), items = (w.groups + each - 1) / each;
    return std::min(w.groups, (items + 3) / 4 * 4);
}

template <typename More, typename Place, typename Take>
void multiply_item(const Rows& x, int64_t rows, const Packed& w, int64_t item, const float* bias, More& more,
                   Place place, Take take) {
    const int64_t items = items_of(w), first = w.groups * item / items, last = w.groups * (item + 1) / items;
    if (w.scaled)
        multiply<Widened>(x, rows, w, first, last, bias, more, place, take);
    else
        multiply<AsTheyLie>(x, rows, w, first, last, bias, more, place, take);
}

}  // namespace
