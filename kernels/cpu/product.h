// Products of rows with packed weights, with sums of float32.
//
// Each output of a row is one sum over the inputs in their order, whatever the number of rows: a row's result has
// the same bits alone and in company. Where weights have scales, a sum is multiplied by its output's when it is whole.
#pragma once
#include <array>
#include <utility>

#include "level_tiles.h"

namespace {

constexpr int64_t PANEL = 32;  // rows that share a reading of a group
// Rows, and tiles, that registers have sums for; whether a pass of R rows puts down what it has widened for later ones.
#if defined(WIDE_REGISTERS)
constexpr int64_t TALL = 8, TOGETHER = 2;
constexpr bool puts_down(int64_t r, bool) { return r == TALL; }
#else
constexpr int64_t TALL = WIDTH == 4 ? 4 : REGISTERS == 16 ? 6 : 8, TOGETHER = WIDTH == LANES ? 2 : 1;
constexpr bool puts_down(int64_t, bool wanted) { return wanted; }
#endif

// Where R rows of a tile begin. SVE repeats an element in all lanes with one instruction where it lies up to 252 bytes from an
// address register, else with two. So there each row has a register of its own.
template <typename Element, int R>
class RowsOfTile {
   public:
#if defined(SVE)
    ALWAYS_INLINE explicit RowsOfTile(const Element* tile) {
        each<R>([&](auto r) ALWAYS_INLINE {
            const Element*& row = rows_[r];
            row = tile + r * 32;
            asm("" : "+r"(row));
        });
    }
    ALWAYS_INLINE const Element* operator[](int64_t r) const { return rows_[r]; }

   private:
    const Element* rows_[R];
#else
    ALWAYS_INLINE explicit RowsOfTile(const Element* tile) : tile_(tile) {}
    ALWAYS_INLINE const Element* operator[](int64_t r) const { return tile_ + r * 32; }

   private:
    const Element* tile_;
#endif
};

// The sums of R rows, in c0 and c1 (rows of 16), += x times the blocks `first` to `last` of a group. FRESH: by the first rows
// that meet them; KEPT: others will. For each pair of inputs `share` bytes are asked for, from `ahead` on, in the second cache.
template <typename Source, int R, bool FRESH, bool KEPT>
void multiply_rows(const typename Source::Element* x, const Source& w, int64_t first, int64_t last, const char* ahead,
                   int64_t share, float* c0, float* c1) {
    constexpr int64_t T = R == 1 ? 2 : TOGETHER;  // of one row both tiles: the sums of one would wait for each other
    float* const c[2] = {c0, c1};
    for (int64_t tile = 0; tile < 2; tile += T) {
        Vec sum[R][T];
        each<R>([&](auto r) ALWAYS_INLINE {
            each<T>([&](auto t) ALWAYS_INLINE { sum[r][t] = load(c[tile + t] + r * 16); });
        });
        const auto* in = x;
        for (int64_t block = first; block < last; block++, in += TILE) {
            const RowsOfTile<typename Source::Element, R> rows(in);
            for (int64_t which = 0; which < 2; which++) {
                const auto weights = w.template sixteen<FRESH, KEPT>(block, which);
#pragma GCC unroll 8
                for (int64_t pair = 0; pair < 8; pair++) {
                    const auto w0 = weights.two(tile, pair), w1 = T > 1 ? weights.two(1, pair) : w0;
                    if (tile == 0) {
                        __builtin_prefetch(ahead, 0, 2);
                        if (share > 64) __builtin_prefetch(ahead + 64, 0, 2);
                        if (FRESH) w.ask(block, which * 8 + pair);
                        ahead += share;
                    }
                    each<R>([&](auto r) ALWAYS_INLINE {
                        const auto* two = rows[r] + which * 16 + pair * 2;
                        sum[r][0] = w0.times(two, sum[r][0]);
                        if (T > 1) sum[r][T - 1] = w1.times(two, sum[r][T - 1]);
                    });
                }
            }
        }
        each<R>([&](auto r) ALWAYS_INLINE {
            each<T>([&](auto t) ALWAYS_INLINE { store(c[tile + t] + r * 16, sum[r][t]); });
        });
    }
}

#if defined(WIDE_REGISTERS)
// The same with halves. The products of a block are summed in float16, of even and odd inputs apart, and these two sums added
// to the floats times the block's size: 16 of them one after the other lose less than rounding an input to bfloat16.
template <typename Source, int R, bool FRESH, bool>
void multiply_rows(HalfTile x, const Source& w, int64_t first, int64_t last, const char* ahead, int64_t share, float* c0,
                   float* c1) {
    for (int64_t block = first; block < last; block++, x.x += TILE, x.sizes += 16) {
        const half* weights = w.block(block);
        __m512i sum[2][R] = {};
        for (int64_t pair = 0; pair < 16; pair++, ahead += share) {
            __builtin_prefetch(ahead, 0, 2);
            if (share > 64) __builtin_prefetch(ahead + 64, 0, 2);
            if (FRESH) w.ask(block, pair);
            for (int64_t i = 0; i < 2; i++) {
                const __m512i of_input = _mm512_load_si512(weights + (pair * 2 + i) * GROUP);
                for (int r = 0; r < R; r++) sum[i][r] = add_halves(sum[i][r], x.x + r * 32 + pair * 2 + i, of_input);
            }
        }
        for (int r = 0; r < R; r++) {
            const __m512i both = plus(sum[0][r], sum[1][r]);
            const __m512 size = _mm512_set1_ps(x.sizes[r]), low = _mm512_cvtph_ps(_mm512_castsi512_si256(both));
            const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(both, 1));
            _mm512_store_ps(c0 + r * 16, _mm512_fmadd_ps(low, size, _mm512_load_ps(c0 + r * 16)));
            _mm512_store_ps(c1 + r * 16, _mm512_fmadd_ps(high, size, _mm512_load_ps(c1 + r * 16)));
        }
    }
}

#endif

// By how many rows there are.
template <typename Source, bool FRESH, bool WANTED, size_t... R>
constexpr auto rows_of(std::index_sequence<R...>) {
    using Operand = decltype(Rows().operand(0, 0, typename Source::Element{}));
    using Way = void (*)(Operand, const Source&, int64_t, int64_t, const char*, int64_t, float*, float*);
    return std::array<Way, sizeof...(R)>{multiply_rows<Source, int(R) + 1, FRESH, puts_down(R + 1, WANTED)>...};
}

// How many rows are next, MOST at most and none of the next 16: where 16 is no whole number of MOST, about the same number each time.
template <int64_t MOST>
int64_t height(int64_t row, int64_t rows) {
    if (16 % MOST == 0) return std::min(MOST, rows);
    const int64_t left = std::min(rows, 16 - row % 16), times = (left + MOST - 1) / MOST;
    return (left + times - 1) / times;
}

// The sums c of a panel, of rows from `row` on, += x times one group. A chunk meets all rows, then the next; overlap what is
// ahead is asked for evenly: all of it beside the first rows alone, memory would be what they wait for.
template <typename Source>
void multiply_panel(const Rows& x, int64_t row, int64_t rows, const Source& w, const Quarters& c) {
    constexpr std::make_index_sequence<TALL> up_to_tall;
    // One table: GCC 12 miscompiles a choice between two constexpr ones.
    static constexpr std::array by_rows{rows_of<Source, true, true>(up_to_tall), rows_of<Source, false, true>(up_to_tall),
                                        rows_of<Source, true, false>(up_to_tall)};
    const int64_t share = (Source::SHARE * TALL + rows - 1) / std::max(rows, TALL);
    for (int64_t first = 0; first < x.blocks; first += CHUNK) {
        const int64_t last = std::min(x.blocks, first + CHUNK);
        const char* ahead = w.ahead(first);
        for (int64_t i = 0, tall; i < rows; i += tall, ahead += (last - first) * 16 * share) {
            tall = height<TALL>(row + i, rows - i);
            by_rows[i > 0 ? 1 : rows > tall ? 0 : 2][tall - 1](x.operand(row + i, first, typename Source::Element{}), w, first,
                                                               last, ahead, share, c.at(i, 0), c.at(i, 1));
        }
    }
}

struct Nothing {  // what is added to a product before it is taken: see AtHand in expand.h
    void begin(const Packed&, int64_t) {}
    bool any() const { return false; }
    void add_tiles(int64_t, int64_t) const {}
    void add(int64_t, int64_t, const Quarters&) const {}
};

// How many rows enter a product: all of them, or of each group the first so many.
struct Count {
    int64_t rows;
    const int32_t* of_group;  // null: all

    Count(int64_t all, const int32_t* some = nullptr) : rows(all), of_group(some) {}
    int64_t of(int64_t g) const { return of_group ? of_group[g] : rows; }
};

// The sums c of a panel, of rows from `row` on, = x times a group of bfloat16 or float16, plus the bias.
template <typename Source>
struct Plain {
    static constexpr bool ALONE = read_in_order(BFLOAT16) && !std::is_same_v<typename Source::Element, half>;

    static void begin() {}
    static void end() {}
    static void panel(const Rows& x, int64_t row, int64_t rows, const Packed& w, int64_t g, const Biases& bias, const Quarters& c) {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t half = 0; half < 2; half++) store(c.at(i, half), w.halves ? Vec{} : load(bias.half[half]));
        multiply_panel(x, row, rows, Source(w.group(g)), c);
        for (int64_t half = 0; half < 2 && w.halves; half++) {
            const Vec scale = load(w.scales(g) + half * 16), more = load(bias.half[half]);
            for (int64_t i = 0; i < rows; i++) store(c.at(i, half), fma(load(c.at(i, half)), scale, more));
        }
    }

    // The same of one row and N groups side by side, each read from its first byte to its last.
    template <int N>
    static void alone(const Rows& x, const Packed& w, const int64_t* groups, const float* bias, const Quarters* c) {
        const char* from[N];
        Vec sum[N][2];
        each<N>([&](auto i) ALWAYS_INLINE {
            from[i] = w.group(groups[i]);
            const Biases of(bias, w, groups[i]);
            each<2>([&](auto t) ALWAYS_INLINE { sum[i][t] = load(of.half[t]); });
        });
        const auto* in = x.operand(0, 0, typename Source::Element{});
        for (int64_t block = 0; block < x.blocks; block++, in += TILE)
            each<2>([&](auto t) ALWAYS_INLINE {
#pragma GCC unroll 16
                for (int64_t pair = 0; pair < 16; pair++)
                    each<N>([&](auto i) ALWAYS_INLINE {
                        const bf16* two = (const bf16*)from[i] + ((block * 2 + t) * 16 + pair) * 32;
                        sum[i][t] = TwoInputs<typename Source::Element>(two).times(in + pair * 2, sum[i][t]);
                    });
            });
        each<N>([&](auto i) ALWAYS_INLINE { each<2>([&](auto t) ALWAYS_INLINE { store(c[i].at(0, t), sum[i][t]); }); });
    }
};

// The same of weights in few bits. A chunk meets all rows, then the next.
template <Kept KEPT>
struct Levels {
    static constexpr bool ALONE = read_in_order(KEPT);

    static void begin() {
        if (tiled<KEPT>()) begin_level_tiles();
    }
    static void end() {
        if (tiled<KEPT>()) end_tiles();
    }
    static void panel(const Rows& x, int64_t row, int64_t rows, const Packed& w, int64_t g, const Biases& bias, const Quarters& c) {
        static constexpr auto by_rows = level_rows_of<KEPT>(std::make_index_sequence<LEVELS_TALL>());
        static constexpr Layout L = layout_of(KEPT);
        constexpr int64_t LINES = (L.block_bytes() + 63) / 64;
        const LevelsGroup group(w, g, bias, c);
        const int64_t begin = tiled<KEPT>() ? multiply_sixteens<KEPT>(x.whole.from(row), rows, w, g, group) : 0;
        const int64_t times = (rows - begin + LEVELS_TALL - 1) / LEVELS_TALL;
        const int64_t blocks = times == 1 ? w.blocks : LEVELS_CHUNK;  // nobody else needs them in the first cache
        for (int64_t first = 0; first < x.blocks && times; first += blocks) {
            LevelsChunk chunk(w, g, first, blocks, (LINES + times - 1) / times, L);
            for (int64_t i = begin, tall; i < rows; i += tall) {
                tall = height<LEVELS_TALL>(row + i, rows - i);
                by_rows[tall - 1](x.whole.from(row + i), chunk, &group, i);
            }
        }
    }

    template <int N>
    static void alone(const Rows& x, const Packed& w, const int64_t* groups, const float* bias, const Quarters* c) {
        const auto given = each_made<N>([&](auto i) { return LevelsGroup(w, groups[i], Biases(bias, w, groups[i]), c[i]); });
        LevelsChunk all(w, groups[0], 0, w.blocks, 0, layout_of(KEPT));
        multiply_level_rows<KEPT, 1, N, true>(x.whole, all, given.data(), 0);
    }
};

// x [rows, k] times the groups `first` to `last` of a weight, plus the bias. place(row, count, group) says where a product
// goes, of `count` rows from `row` on, as Quarters; all rows of a tile are written. take(row, count, group, c) gets it.
//
// With vectors: a panel meets all groups, then the next.
template <typename Product, typename More, typename Place, typename Take>
void multiply_with_vectors(const Rows& x, Count rows, const Packed& w, int64_t first, int64_t last, const float* bias,
                           More& more, Place place, Take take) {
    Product::begin();
    for (int64_t row = 0; row < rows.rows; row += PANEL) {
        for (int64_t g = first; g < last; g++) {
            const int64_t count = std::min(PANEL, rows.of(g) - row);
            if (count <= 0) continue;
            more.begin(w, g);
            const Quarters c = place(row, count, g);
            Product::panel(x, row, count, w, g, Biases(bias, w, g), c);
            more.add(row, count, c);
            take(row, count, g, c);
        }
    }
    Product::end();
}

// By how many groups are read side by side.
template <typename Product, size_t... N>
constexpr auto alone_of(std::index_sequence<N...>) {
    using Way = void (*)(const Rows&, const Packed&, const int64_t*, const float*, const Quarters*);
    return std::array<Way, sizeof...(N)>{Product::template alone<int(N) + 1>...};
}

// The same of one row, and some groups side by side.
template <typename Product, typename More, typename Place, typename Take>
void multiply_alone(const Rows& x, Count rows, const Packed& w, int64_t first, int64_t last, const float* bias, More& more,
                    Place place, Take take) {
    static constexpr auto by_groups = alone_of<Product>(std::make_index_sequence<SIDE_BY_SIDE>());
    alignas(64) float sums[SIDE_BY_SIDE][PANEL * GROUP];
    const auto c = each_made<SIDE_BY_SIDE>([&](auto i) { return Quarters(sums[i]); });
    int64_t left = 0, most = side_by_side(w.kept);
    for (int64_t g = first; g < last; g++) left += rows.of(g) > 0;
    for (int64_t g = first, count; left; left -= count) {
        const int64_t times = (left + most - 1) / most;
        int64_t groups[SIDE_BY_SIDE], found = 0;
        for (count = (left + times - 1) / times; found < count; g++)
            if (rows.of(g)) groups[found++] = g;
        by_groups[count - 1](x, w, groups, bias, c.data());
        for (int64_t i = 0; i < count; i++) {
            more.begin(w, groups[i]);
            const Quarters there = place(0, 1, groups[i]);
            for (int64_t half = 0; half < 2; half++) store(there.at(0, half), load(c[i].at(0, half)));
            more.add(0, 1, there);
            take(0, 1, groups[i], there);
        }
    }
}

template <typename Product, typename... Rest>
void multiply_vectors(const Rows& x, Count rows, const Packed& w, Rest&... rest) {
    if constexpr (Product::ALONE)
        if (rows.rows == 1 && side_by_side(w.kept)) return multiply_alone<Product>(x, rows, w, rest...);
    multiply_with_vectors<Product>(x, rows, w, rest...);
}

// How many rows and weights a product with tiles meets before it goes on. A band of rows stays in the second cache while it meets all
// groups of an item. A part of a group stays in the first while the band meets it, and the band's rows pass by.
struct Cut {
    static constexpr int64_t BAND = 512 << 10, PART = 18;  // bytes of rows; blocks
    static constexpr int64_t MOST = BAND / ((PART + 1) * 2 * TILE * int64_t(sizeof(bf16))) + 1;  // panels of a band, if there are parts
    int64_t band, part;  // rows; blocks

    Cut(int64_t rows, int64_t blocks) {
        const int64_t panels = (rows + PANEL - 1) / PANEL, parts = (blocks + PART - 1) / PART;
        const int64_t bands = (panels * blocks * 2 * TILE * int64_t(sizeof(bf16)) + BAND - 1) / BAND;
        band = (panels + bands - 1) / std::max<int64_t>(bands, 1) * PANEL;
        part = band > PANEL ? (blocks + parts - 1) / parts : blocks;
    }
};

// With tiles. Sums stay in them; between the parts of a group they are put down and taken up again, which changes no bit.
template <bool passing, typename More, typename Place, typename Take>
void multiply_with_tiles(const Rows& x, Count rows, const Packed& w, int64_t first, int64_t last, const Cut& cut, const float* bias,
                         More& more, Place place, Take take) {
    alignas(64) float partial[Cut::MOST][PANEL * GROUP];
    for (int64_t top = 0; top < rows.rows; top += cut.band)
        for (int64_t g = first; g < last; g++) {
            const int64_t end = std::min(rows.of(g), top + cut.band);
            if (end <= top) continue;
            const Biases biases(bias, w, g);
            const int64_t panels = (end - top + PANEL - 1) / PANEL;
            Ahead ahead{w.group(g + 1), passing && !top && g + 1 < w.groups ? (2 * TILE / 32 + panels - 1) / panels : 0};
            more.begin(w, g);
            for (int64_t block = 0; block < w.blocks; block += cut.part) {
                const int64_t count = std::min(cut.part, w.blocks - block);
                for (int64_t row = top; row < end; row += PANEL) {
                    const int64_t tall = std::min(PANEL, end - row);
                    const Quarters between(partial[(row - top) / PANEL % Cut::MOST]);
                    if (block)
                        load_sums(between, tall);
                    else
                        begin_sums(biases.half, tall);
                    multiply_tiles<passing>(x.at(row, block), x.at(row + 16, block), (const bf16*)w.group(g) + block * 2 * TILE, count,
                                            tall, row == 0, ahead);
                    if (block + count < w.blocks) {
                        store_sums(between, tall);
                        continue;
                    }
                    const Quarters c = place(row, tall, g);
                    more.add_tiles(row, tall);
                    store_sums(c, tall);
                    take(row, tall, g, c);
                }
            }
        }
}

template <typename... Rest>
void multiply_with_tiles(const Rows& x, Count rows, const Packed& w, int64_t first, int64_t last, Rest&... rest) {
    const Cut cut(rows.rows, w.blocks);
    begin_tiles(rows.rows);
    if (cut.band > PANEL)
        multiply_with_tiles<true>(x, rows, w, first, last, cut, rest...);
    else
        multiply_with_tiles<false>(x, rows, w, first, last, cut, rest...);
    end_tiles();
}

template <typename... Rest>
void multiply_bfloat16(Rest&... rest) {
#if defined(WIDE_REGISTERS)
    switch (instructions()) {
        case FLOATS: break;
        case PAIRS: return multiply_vectors<Plain<AsTheyLie<bf16>>>(rest...);
        case TILES: return multiply_with_tiles(rest...);
        case HALVES: return multiply_vectors<Plain<AsTheyLie<half>>>(rest...);
    }
#endif
    multiply_vectors<Plain<Floats>>(rest...);
}

// Items of work: some 96 KiB of weights each, a few microseconds' reading, and as many as two or four threads share evenly.
// Of many rows, which are more than the second cache holds, half a MiB: so they are read from beyond it less often. Where groups
// are read side by side, an item has that many, or nearly.
inline int64_t items_of(const Packed& w, int64_t rows) {
    const int64_t together = rows == 1 && read_in_order(w.kept) ? std::max(side_by_side(w.kept), 1) : 1;
    const int64_t bytes = (rows > 4 * PANEL ? 512 : 96) << 10;
    const int64_t each = std::max<int64_t>(1, bytes / w.blocks_bytes / together) * together;
    const int64_t items = std::max<int64_t>(4, ((w.groups + each - 1) / each + (together > 1 ? 1 : 3)) / 4 * 4);
    return std::min(w.paired ? (w.groups + 1) / 2 : w.groups, items);
}

template <typename More, typename Place, typename Take>
void multiply_item(const Rows& x, Count rows, const Packed& w, int64_t item, const float* bias, More& more,
                   Place place, Take take) {
    // Of gate and up two groups together are 32 inputs of what follows, which one thread gives.
    const int64_t items = items_of(w, rows.rows), step = w.paired ? 2 : 1, steps = (w.groups + step - 1) / step;
    const int64_t first = steps * item / items * step, last = std::min(w.groups, steps * (item + 1) / items * step);
    switch (w.kept) {
        case BFLOAT16: return multiply_bfloat16(x, rows, w, first, last, bias, more, place, take);
#define LEVELS(KEPT) \
    case KEPT: return multiply_vectors<Levels<KEPT>>(x, rows, w, first, last, bias, more, place, take);
        LEVELS(INT8) LEVELS(INT4) LEVELS(Q8_0) LEVELS(Q4_0) LEVELS(Q4_1) LEVELS(Q4_K) LEVELS(Q6_K)
        LEVELS(Q5_0) LEVELS(Q5_1) LEVELS(Q5_K) LEVELS(IQ4_NL) LEVELS(IQ4_XS) LEVELS(MXFP4)
#undef LEVELS
    }
}

}  // namespace
