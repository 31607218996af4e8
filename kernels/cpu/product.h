// Products of rows with packed weights, of what is rounded to bfloat16, with sums of float32.
//
// Each output of a row is one sum over the inputs in their order, whatever the number of rows: a row's result has
// the same bits alone and in company. Where weights have scales, a sum is multiplied by its output's when it is whole.
#pragma once
#include "tiles.h"

namespace {

constexpr int64_t PANEL = 32;  // rows that share a reading of a group
constexpr int64_t TALL = 8;    // rows that registers have sums for

// The sums of R rows, in c0 and c1 (rows of 16), += x times the blocks `first` to `last` of a group. fresh: see Widened.
template <int R, typename Source>
void multiply_rows(const typename Source::Element* x, const Source& w, int64_t first, int64_t last, bool fresh,
                   float* c0, float* c1) {
    using Weights = TwoInputs<typename Source::Element>;
    __m512 sum[R][2];
    for (int r = 0; r < R; r++) sum[r][0] = _mm512_load_ps(c0 + r * 16), sum[r][1] = _mm512_load_ps(c1 + r * 16);
    for (int64_t block = first; block < last; block++, x += TILE) {
        const auto* tiles = w.block(block, fresh);
        for (int64_t pair = 0; pair < 16; pair++) {
            const Weights w0(tiles + pair * 32), w1(tiles + TILE + pair * 32);
            if (fresh) w.ask_part(block, pair);
            for (int r = 0; r < R; r++) {
                sum[r][0] = w0.times(x + r * 32 + pair * 2, sum[r][0]);
                sum[r][1] = w1.times(x + r * 32 + pair * 2, sum[r][1]);
            }
        }
    }
    for (int r = 0; r < R; r++) _mm512_store_ps(c0 + r * 16, sum[r][0]), _mm512_store_ps(c1 + r * 16, sum[r][1]);
}

// The sums c of a panel += x (from the row that starts it) times one group. A few blocks meet all rows, then the next.
template <typename Source>
void multiply_panel(const typename Source::Element* x, const Source& w, int64_t blocks, int64_t rows, const Quarters& c) {
    static constexpr decltype(&multiply_rows<1, Source>) few[] = {
        multiply_rows<1, Source>, multiply_rows<2, Source>, multiply_rows<3, Source>, multiply_rows<4, Source>,
        multiply_rows<5, Source>, multiply_rows<6, Source>, multiply_rows<7, Source>, multiply_rows<8, Source>};
    for (int64_t first = 0; first < blocks; first += Source::CHUNK)
        for (int64_t row = 0; row < rows; row += TALL)
            few[std::min(TALL, rows - row) - 1](x + (row / 16 * blocks + first) * TILE + row % 16 * 32, w, first,
                                                std::min(blocks, first + Source::CHUNK), !row, c.at(row, 0),
                                                c.at(row, 1));
}

// Rows of a panel as its products want them: as they lie, or widened.
inline const bf16* operand(const Rows& x, int64_t row, int64_t, bf16) { return x.at(row, 0); }
inline const float* operand(const Rows& x, int64_t row, int64_t rows, float) {
    thread_local std::vector<float> kept;
    float* wide = aligned(kept, PANEL * x.blocks * 32);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t block = 0; block < x.blocks; block++) {
            const bf16* from = x.at(row + i, block);
            float* to = wide + (i / 16 * x.blocks + block) * TILE + i % 16 * 32;
            store(to, load(from));
            store(to + 16, load(from + 16));
        }
    return wide;
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

struct Biases {  // of a group's two tiles; null: none, else readable up to the groups' end
    const float* half[2];

    Biases(const float* bias, const Packed& w, int64_t g) : half{none(), none()} {
        for (int64_t i = 0; i < 2 && bias; i++) half[i] = bias + w.column(g, i);
    }
    static const float* none() {
        alignas(64) static const float zeros[16] = {};
        return zeros;
    }
};

// x [rows, k] times the groups `first` to `last` of a weight, plus the bias. place(row, count, group) says where a product
// goes, of `count` rows from `row` on, as Quarters; all rows of a tile are written. take(row, count, group, c) gets it.
//
// With vectors: of all groups a panel after the other, so that a panel is widened once.
template <typename Source, typename More, typename Place, typename Take>
void multiply_with_vectors(const Rows& x, int64_t rows, const Packed& w, int64_t first, int64_t last, const float* bias,
                           More& more, Place place, Take take) {
    Source source(w, false);
    for (int64_t row = 0; row < rows; row += PANEL) {
        const int64_t count = std::min(PANEL, rows - row);
        const auto* panel = operand(x, row, count, typename Source::Element{});
        for (int64_t g = first; g < last; g++) {
            const Biases biases(bias, w, g), start(Source::SCALED ? nullptr : bias, w, g);
            source.begin(w, g);
            more.begin(w, g);
            const Quarters c = place(row, count, g);
            for (int64_t i = 0; i < count; i++)
                for (int64_t half = 0; half < 2; half++) store(c.at(i, half), load(start.half[half]));
            multiply_panel(panel, source, w.blocks, count, c);
            if (Source::SCALED) scale_sums(c, count, source.unit(), w.scales(g), biases.half);
            more.add(row, count, c);
            take(row, count, g, c);
        }
    }
}

// With tiles: of a group all panels, whose sums stay in tiles.
template <typename Source, typename More, typename Place, typename Take>
void multiply_with_tiles(const Rows& x, int64_t rows, const Packed& w, int64_t first, int64_t last, const float* bias,
                         More& more, Place place, Take take) {
    Source source(w, rows > PANEL);
    begin_tiles();
    for (int64_t g = first; g < last; g++) {
        const Biases biases(bias, w, g), start(Source::SCALED ? nullptr : bias, w, g);
        source.begin(w, g);
        more.begin(w, g);
        for (int64_t row = 0; row < rows; row += PANEL) {
            const int64_t count = std::min(PANEL, rows - row);
            const Quarters c = place(row, count, g);
            multiply_tiles(x.at(row, 0), source, w.blocks, count, row == 0, start.half);
            if (Source::SCALED) {
                store_sums(c, count);
                scale_sums(c, count, source.unit(), w.scales(g), biases.half);
                if (more.any()) load_sums(c, count);
            }
            more.add_tiles(row, count);
            if (!Source::SCALED || more.any()) store_sums(c, count);
            take(row, count, g, c);
        }
    }
    end_tiles();
}

template <typename Format, typename... Rest>
void multiply(Rest&... rest) {
    switch (instructions()) {
        case FLOATS: return multiply_with_vectors<Source<Format, float>>(rest...);
        case PAIRS: return multiply_with_vectors<Source<Format, bf16>>(rest...);
        case TILES: return multiply_with_tiles<Source<Format, bf16>>(rest...);
    }
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
    switch (w.kept) {
        case BFLOAT16: return multiply<Brain>(x, rows, w, first, last, bias, more, place, take);
        case INT8: return multiply<Eight>(x, rows, w, first, last, bias, more, place, take);
        case INT4: return multiply<Four>(x, rows, w, first, last, bias, more, place, take);
    }
}

}  // namespace
