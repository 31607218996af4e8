// Products of rows of whole numbers with weights in few bits.
//
// Levels times numbers are summed exactly where they share scales. Such a sum times its scales is added to a float32, block after
// block. So the bits are the same on all sets of instructions, and for any number of rows.
#pragma once
#include <array>
#include <utility>

#include "dots_of_two.h"
#include "sources.h"

namespace {

constexpr int64_t LEVELS_CHUNK = 16;  // blocks of a group that meet all rows of a panel, before the next do

// Such blocks. `ahead`: what is asked for from here on in the second cache, `share` lines for each block of each pass over them.
struct LevelsChunk {
    const int64_t first, last, share, at;  // at: bytes from a group's first block
    const char* ahead;

    LevelsChunk(const Packed& w, int64_t g, int64_t first, int64_t blocks, int64_t share, const Layout& l)
        : first(first), last(std::min(w.blocks, first + blocks)), share(share), at(l.blocks_bytes(first)),
          ahead(w.group(g) + at + FAR) {}
};

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

// One group of a product, and where its sums lie.
struct LevelsGroup {
    const char* blocks;
    const float* scales;  // of outputs; null: there are none
    Biases bias;
    Quarters c;

    LevelsGroup(const Packed& w, int64_t g, const Biases& bias, const Quarters& c)
        : blocks(w.group(g)), scales(w.scaled ? w.scales(g) : nullptr), bias(bias), c(c) {}
};

constexpr int64_t LEVELS_TALL = WIDTH == LANES ? 6 : 4;  // rows that registers have sums for

// How a format's blocks are read, 16 outputs at a time.
template <Kept KEPT>
struct Reader {
    static constexpr Layout L = layout_of(KEPT);
    using Sums = Dots<L.bits == 8 || L.table ? -1 : (1 << L.bits) - 1>;
    static constexpr int64_t WORDS = L.bits == 8 ? 1 : L.bits == 4 ? 2 : 4;  // of four inputs that are read together

    // What all places of the reading share: the table that levels are looked up in.
    ALWAYS_INLINE static Table table() {
        if constexpr (L.table != nullptr) return Table(L.table);
        return Table();
    }

    // Four inputs: of the words that are read together number `i`, from it the one of this place.
    template <typename Place>
    ALWAYS_INLINE static IVec levels(const char* lines, int64_t i, Place place, const Table& table) {
        constexpr int word = Place::value;
        if constexpr (L.bits == 8) return load_words(lines + i * 64);
        const int64_t line = WORDS == 2 ? i : i * 2 + word / 2;
        const IVec low = (load_words(lines + line * 64) >> word % 2 * 4) & 0x0f0f0f0f;
        if constexpr (L.table != nullptr) return table.of(low);
        if constexpr (L.bits == 5) return low | (((load_words(lines + 4 * 64) >> int32_t(i * 4 + word)) & 0x01010101) << 4);
        if constexpr (L.bits == 6) return low | (((load_words(lines + (4 + i) * 64) >> word * 2) & 0x03030303) << 4);
        return low;
    }

    // Of 16 outputs, of which a block has two; of the inputs that share scales, the part.
    static Vec scale(const char* super, const char* block, int64_t half, int64_t part) {
        switch (KEPT) {
            case INT4: return steps(signed_bytes(block + half * 32 + part * 16));
            case Q4_K:
            case Q5_K:
            case IQ4_XS: return floats(signed_bytes(block + half * 16)) * load((const ::half*)super + half * 16);
            case MXFP4: return powers(signed_bytes(block + half * 16) & 255);
            case Q6_K: return floats(signed_bytes(block + half * 32 + part * 16)) * load((const ::half*)super + half * 16);
            default: return load((const ::half*)block + half * 16);
        }
    }
    static Vec least(const char* super, const char* block, int64_t half) {
        if (KEPT == Q4_1 || KEPT == Q5_1) return load((const ::half*)block + GROUP + half * 16);
        return Vec{} - floats(signed_bytes(block + GROUP + half * 16)) * load((const ::half*)super + GROUP + half * 16);
    }

   private:
    // 2^(code - 128), and 0 where that is too small for a float.
    static Vec powers(IVec codes) { return (Vec)((codes - ((codes > 0) & 1)) << 23); }
    static Vec steps(IVec codes) { return (Vec)(((codes << 19) & int32_t(0x83f80000)) | int32_t(120 << 23)); }
};

// Of R rows, `row` and the next of c: += x times a chunk of G groups, and the bias with the first one; with the last one their
// outputs' scales.
template <Kept KEPT, int R, int G, bool IN_ORDER>
void multiply_level_rows(WholeRows x, LevelsChunk& chunk, const LevelsGroup* groups, int64_t row) {
    using Read = Reader<KEPT>;
    constexpr int T = WIDTH == LANES || R == 1 ? 2 : 1;  // times 16 outputs
    constexpr int TOGETHER = IN_ORDER ? 1 : T;  // of these at once
    constexpr int64_t PARTS = 32 / Read::L.per_scale, READINGS = 8 / Read::WORDS / PARTS;
    const Table table = Read::table();
    constexpr int32_t ZERO = Read::L.zero + Read::Sums::RAISED, LOG_ZERO = __builtin_ctz(ZERO | 1 << 30);
    for (int64_t half = 0; half < 2; half += T) {
        Vec total[G][R][T];
        each<G>([&](auto g) ALWAYS_INLINE {
            each<R>([&](auto r) ALWAYS_INLINE {
                each<T>([&](auto t) ALWAYS_INLINE {
                    total[g][r][t] = chunk.first      ? load(groups[g].c.at(row + r, half + t))
                                     : Read::L.scaled ? Vec{}
                                                      : load(groups[g].bias.half[half + t]);
                });
            });
        });
        int64_t at = chunk.at, super_at = at;
        const char* ahead = chunk.ahead;
        const int64_t share = half == 0 ? chunk.share : 0;
        for (int64_t b = chunk.first; b < chunk.last; b++, at += Read::L.block_bytes()) {
            if (Read::L.super_bytes && b % TOGETHER_K == 0) super_at = at, at += Read::L.super_bytes;
            for (int64_t line = 0; !IN_ORDER && line < share; line++, ahead += 64) __builtin_prefetch(ahead, 0, 2);
            if (!IN_ORDER && row == 0)
                each<int(T * Read::L.bits)>([&](auto line) ALWAYS_INLINE {
                    __builtin_prefetch(groups[0].blocks + at + Read::L.scale_bytes + half * Read::L.half_bytes() + line * 64 + NEAR);
                });
            each<T / TOGETHER>([&](auto tile) ALWAYS_INLINE {
                const int64_t first = half + tile * TOGETHER;
                each<int(PARTS)>([&](auto part) ALWAYS_INLINE {
                    typename Read::Sums sum[G][R][TOGETHER];
                    each<R>([&](auto r) ALWAYS_INLINE {
                        const int32_t* less = x.less + (b * 3 + (PARTS == 2 ? 1 + part : 0)) * 16 + r;
                        const IVec from = ZERO ? splat(*less) << LOG_ZERO : IVec{};
                        each<G>([&](auto g) ALWAYS_INLINE { each<TOGETHER>([&](auto t) ALWAYS_INLINE { sum[g][r][t].begin(from); }); });
                    });
                    auto read = [&](int64_t reading) ALWAYS_INLINE {
                        const int64_t i = part * READINGS + reading;
                        each<int(Read::WORDS)>([&](auto word) ALWAYS_INLINE {
                            const int8_t* numbers = x.numbers + b * 16 * 32 + (i * Read::WORDS + word) * 4;
                            each<G>([&](auto g) ALWAYS_INLINE {
                                std::array<typename Read::Sums::Levels, TOGETHER> levels;
                                each<TOGETHER>([&](auto t) ALWAYS_INLINE {
                                    const char* lines = groups[g].blocks + at + Read::L.scale_bytes + (first + t) * Read::L.half_bytes();
                                    levels[t] = typename Read::Sums::Levels(Read::levels(lines, i, word, table));
                                });
                                each<R>([&](auto r) ALWAYS_INLINE {
                                    int32_t four;
                                    std::memcpy(&four, numbers + r * 32, 4);
                                    const IVec inputs = splat(four);
                                    each<TOGETHER>([&](auto t) ALWAYS_INLINE {
                                        sum[g][r][t].add(levels[t], inputs);
                                        if constexpr ((decltype(word)::value + 1) % Read::Sums::FIT == 0) sum[g][r][t].settle();
                                    });
                                });
                            });
                        });
                    };
                    if constexpr (R == 1) {
                        each<int(READINGS)>(read);
                    } else {
#if defined(DOTS_OF_TWO)
                        constexpr int PAIRS = (R + 1) / 2, LAST = R - 1;  // of an odd number the last row is there twice
                        each<G>([&](auto g) ALWAYS_INLINE {
                            each<TOGETHER>([&](auto t) ALWAYS_INLINE {
                                const char* lines = groups[g].blocks + at + Read::L.scale_bytes + (first + t) * Read::L.half_bytes();
                                DotsOfTwo two[PAIRS];
                                each<PAIRS>([&](auto p) ALWAYS_INLINE {
                                    two[p].begin(sum[g][2 * p][t].whole(), sum[g][std::min(2 * p + 1, LAST)][t].whole());
                                });
                                each<int(4 / PARTS)>([&](auto eight) ALWAYS_INLINE {
                                    constexpr int64_t WORD = decltype(part)::value * 8 / PARTS + 2 * decltype(eight)::value;
                                    auto four = [&](auto next) ALWAYS_INLINE {
                                        constexpr int64_t word = WORD + decltype(next)::value;
                                        return Read::levels(
                                            lines, word / Read::WORDS, std::integral_constant<int, int(word % Read::WORDS)>(), table);
                                    };
                                    const DotsOfTwo::Levels levels(
                                        four(std::integral_constant<int, 0>()), four(std::integral_constant<int, 1>()));
                                    const int8_t* numbers = x.numbers + b * 16 * 32 + WORD * 4;
                                    each<PAIRS>([&](auto p) ALWAYS_INLINE {
                                        two[p].add(levels, numbers + 2 * p * 32, numbers + std::min(2 * p + 1, LAST) * 32);
                                    });
                                });
                                each<R>([&](auto r) ALWAYS_INLINE { sum[g][r][t].begin(two[r / 2].whole(r % 2 == 1)); });
                            });
                        });
                        static_cast<void>(read);
#else
#pragma GCC unroll 1
                        for (int64_t reading = 0; reading < READINGS; reading++) read(reading);
#endif
                    }
                    each<G>([&](auto g) ALWAYS_INLINE {
                        const char *block = groups[g].blocks + at, *super = groups[g].blocks + super_at;
                        each<TOGETHER>([&](auto t) ALWAYS_INLINE {
                            const Vec scale = KEPT == INT8 ? Vec{} : Read::scale(super, block, first + t, part);
                            each<R>([&](auto r) ALWAYS_INLINE {
                                const Vec of_row = splat(x.scales[b * 16 + r]);
                                Vec& all = total[g][r][tile * TOGETHER + t];
                                all = fma(floats(sum[g][r][t].whole()), KEPT == INT8 ? of_row : scale * of_row, all);
                            });
                        });
                    });
                });
                if constexpr (Read::L.least)
                    each<G>([&](auto g) ALWAYS_INLINE {
                        each<TOGETHER>([&](auto t) ALWAYS_INLINE {
                            const Vec least = Read::least(groups[g].blocks + super_at, groups[g].blocks + at, first + t);
                            each<R>([&](auto r) ALWAYS_INLINE {
                                Vec& all = total[g][r][tile * TOGETHER + t];
                                all = fma(least, splat(x.totals[b * 16 + r]), all);
                            });
                        });
                    });
            });
        }
        chunk.ahead = ahead;
        each<G>([&](auto g) ALWAYS_INLINE {
            each<T>([&](auto t) ALWAYS_INLINE {
                each<R>([&](auto r) ALWAYS_INLINE {
                    Vec& all = total[g][r][t];
                    if (Read::L.scaled && chunk.last == x.blocks)
                        all = fma(all, load(groups[g].scales + (half + t) * 16), load(groups[g].bias.half[half + t]));
                    store(groups[g].c.at(row + r, half + t), all);
                });
            });
        });
    }
}

// By how many rows there are.
template <Kept KEPT, size_t... R>
constexpr auto level_rows_of(std::index_sequence<R...>) {
    using Way = void (*)(WholeRows, LevelsChunk&, const LevelsGroup*, int64_t);
    return std::array<Way, sizeof...(R)>{multiply_level_rows<KEPT, int(R) + 1, 1, false>...};
}

}  // namespace
