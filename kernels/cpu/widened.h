// Where a product reads a group's weights, a block of 32 inputs x 32 outputs after the other. As two tiles: of bfloat16, [16
// pairs of inputs][16 outputs][2], or of float32, [32 inputs][16 outputs]; vectors read 16 inputs of both at a time. Or of
// float16, as [32 inputs][32 outputs].
#pragma once
#include "rows.h"

namespace {

inline bool& half_on() {  // few bits are widened through float16: switched off by tests, which want to see both ways
    static bool on = HALVES_BUILT;
    return on;
}

#if defined(WIDE_REGISTERS)
// Float16 as bfloat16 that are 2^112 times too small; the last three bits are lost.
inline __m512i brains(__m512i halves) {
    return _mm512_and_si512(_mm512_srai_epi16(halves, 3), _mm512_set1_epi16(short(0x8fff)));
}
#endif

// How weights are kept: a block's bytes, how many bytes ahead they are asked for, all of a block at once (for tiles), and how
// they become two tiles of bfloat16, or floats of two inputs and half of the outputs (two), `unit` times too large.
struct Brain {  // bfloat16
    static constexpr bool SCALED = false;
    static constexpr int64_t BYTES = 2 * TILE * sizeof(bf16), AHEAD = 1024;

    static float unit(float) { return 1; }

    struct Sixteen {  // inputs of a block
        const bf16* from;

        Sixteen(const char* block, int64_t which) : from((const bf16*)block + which * TILE / 2) {}
        TwoInputs<float> two(int64_t half, int64_t pair) const { return TwoInputs<float>(from + half * TILE + pair * 32); }
    };
};

struct Half {  // float16, with scales that are powers of two
    static constexpr bool SCALED = true;
    static constexpr int64_t BYTES = 2 * TILE * sizeof(half), AHEAD = 1024;
};

// int8. Bfloat16 holds it exactly, times a power of two that makes it cheap: `unit` takes it out of the sum again. Words that
// have the int8 as their upper byte become float16; three bits further down their exponent is a bfloat16's, which is less by
// 112: 2^8 2^-112. So a product of an input and an integer below 2^-22 is lost, as small as a tile's arithmetic has it;
// inputs of a millionth would have to matter. Without float16, and for float32, the int8 is the upper byte of a lane: 2^24.
class Eight {
   public:
    static constexpr bool SCALED = true;
    static constexpr int64_t BYTES = 2 * TILE, AHEAD = 2048;

    static float unit(float) { return 0x1p-24f; }
    static float unit(half) { return 1; }
    float unit(bf16) const { return half_ ? 0x1p104f : 0x1p-24f; }

    struct Sixteen {
        const char* from;

        Sixteen(const char* block, int64_t which) : from(block + which * TILE / 2) {}
        TwoInputs<float> two(int64_t half, int64_t pair) const {
            const IVec bytes = load_words(from + half * TILE + pair / 2 * 64);  // of four inputs
            return {floats(every_second(bytes, unsigned(pair % 2 * 8))), floats(every_second(bytes, unsigned(pair % 2 * 8 + 1)))};
        }
    };

#if defined(WIDE_REGISTERS)
    void widen(const char* from, bf16* to) const {
        half_ ? widen_lines<through_halves>(from, to) : widen_lines<through_floats>(from, to);
    }
    void widen(const char* from, half* to) const {
        for (int64_t i = 0; i < BYTES; i += 32) {
            const __m256i bytes = _mm256_load_si256((const __m256i*)(from + i));
            _mm512_store_si512(to + i, halves(_mm512_cvtepi8_epi16(bytes)));
        }
    }

   private:
    // Which way is chosen outside the loop, which has its constants in registers then.
    template <__m512i (*WAY)(__m512i)>
    static void widen_lines(const char* from, bf16* to) {
        for (int64_t i = 0; i < BYTES; i += 64) {
            const __m512i bytes = _mm512_load_si512(from + i), zero = _mm512_setzero_si512();
            _mm512_store_si512(to + i, WAY(_mm512_unpacklo_epi8(zero, bytes)));
            _mm512_store_si512(to + i + 32, WAY(_mm512_unpackhi_epi8(zero, bytes)));
        }
    }
    static __m512i through_halves(__m512i words) { return brains(halves(words)); }
    static __m512i through_floats(__m512i words) {  // two of a lane
        const __m512i upper = _mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000)));
        const __m512i low = (__m512i)_mm512_cvtepi32_ps(_mm512_slli_epi32(words, 16));
        const __m512i high = (__m512i)_mm512_cvtepi32_ps(upper);
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
    }
#endif

   private:
    const bool half_ = half_on();
};

// int4. What a level times its step is, is looked up and multiplied, exactly in any precision. An element is looked up by the
// lower bits of its place, whatever is above them. A step's code becomes a float by moving its bits to where a float has
// them and putting the rest of the exponent in. Float16 on their way to bfloat16 are 2^12 times what they mean, so that those lose
// no more than of int8.
class Four {
   public:
    static constexpr bool SCALED = true;
    static constexpr int64_t BYTES = STEPS + TILE, AHEAD = 2048;

    static float unit(float) { return 1; }
    static float unit(half) { return 1; }
    float unit(bf16) const { return half_ ? 0x1p100f : 1; }

    struct Sixteen {
        const char* words;
        const Vec step[2];

        Sixteen(const char* block, int64_t which)
            : words(block + STEPS + which * TILE / 4),
              step{step_as_floats(block + which * 16), step_as_floats(block + (2 + which) * 16)} {}
        TwoInputs<float> two(int64_t half, int64_t pair) const {
            const IVec eight = load_words(words + half * TILE / 2 + pair / 4 * 64);  // of each output
            return {level(eight, int(pair % 4)) * step[half], level(eight, int(pair % 4) + 4) * step[half]};
        }
    };

    static Vec step_as_floats(const char* codes) {
        const IVec bits = signed_bytes(codes) << 19;
        return (Vec)((bits & int32_t(0x83f80000)) | int32_t(120 << 23));
    }
    static Vec level(IVec eight, int which) {
#if defined(WIDE_REGISTERS)
        const __m512 levels = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
        return (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)eight, unsigned(which * 4)), levels);
#else
        return floats((eight << (28 - which * 4)) >> 28);
#endif
    }

#if defined(WIDE_REGISTERS)
    void widen(const char* from, bf16* to) const {
        if (half_) {
            const __m512i raised = raised_levels();
            widen_lines(from, to, step_as_halves, [=](__m512i eight, int pair, __m512i step) {
                return brains(as_halves(eight, pair, step, raised));
            });
        } else {
            widen_lines(from, to, step_as_floats, through_floats);
        }
    }
    void widen(const char* from, half* to) const {
        const __m512i all = levels();
        for (int64_t line = 0; line < 8; line++) {  // of four inputs
            const __m512i four = _mm512_load_si512(from + STEPS + line * 64), step = steps_as_halves(from + line / 4 * 32);
            for (int which = 0; which < 4; which++, to += GROUP) _mm512_store_si512(to, as_halves(four, which, step, all));
        }
    }

   private:
    // step_of(codes): the steps of 16 inputs; way(words, pair, steps): two of those inputs. Chosen outside the loop, which has
    // its constants in registers then.
    template <typename Step, typename Way>
    static void widen_lines(const char* from, bf16* to, Step step_of, Way way) {
        const char* words = from + STEPS;
        for (int64_t sixteen = 0; sixteen < 4; sixteen++) {
            const auto step = step_of(from + sixteen * 16);
            for (int line = 0; line < 2; line++, words += 64) {
                const __m512i eight = _mm512_load_si512(words);
#pragma GCC unroll 4
                for (int pair = 0; pair < 4; pair++, to += 32) _mm512_store_si512(to, way(eight, pair, step));
            }
        }
    }
    static __m512i step_as_halves(const char* codes) {  // a pair of each
        const __m512i all = _mm512_cvtepu8_epi32(_mm_load_si128((const __m128i*)codes));
        return as_steps(_mm512_or_si512(_mm512_slli_epi32(all, 24), _mm512_slli_epi32(all, 8)));
    }
    static __m512i steps_as_halves(const char* codes) {  // 32 of them
        const __m512i all = _mm512_cvtepu8_epi16(_mm256_load_si256((const __m256i*)codes));
        return as_steps(_mm512_slli_epi16(all, 8));
    }
    static __m512i as_steps(__m512i codes) {  // in the upper bytes of words
        return either(_mm512_srai_epi16(codes, 2), 0x9fc09fc0u, 0x20002000u);
    }
    static __m512i either(__m512i bits, uint32_t of_them, uint32_t besides) {
        return _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(int(of_them)), _mm512_set1_epi32(int(besides)), 0xea);
    }
    static __m512i levels() {
        return _mm512_broadcast_i64x4(_mm256_setr_epi16(
            0, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700, short(0xc800), short(0xc700), short(0xc600),
            short(0xc500), short(0xc400), short(0xc200), short(0xc000), short(0xbc00)));
    }
    static __m512i as_halves(__m512i eight, int pair, __m512i step, __m512i levels) {
        return times(_mm512_permutexvar_epi16(_mm512_srli_epi16(eight, unsigned(pair * 4)), levels), step);
    }
    static __m512i raised_levels() {
        const __m512i all = levels(), raised = _mm512_set1_epi16(12 << 10);
        return _mm512_mask_add_epi16(all, _mm512_test_epi16_mask(all, all), all, raised);
    }
    static __m512i through_floats(__m512i eight, int pair, Vec step) {
        const __m512i low = (__m512i)(level((IVec)eight, pair) * step);
        const __m512i high = (__m512i)(level((IVec)eight, pair + 4) * step);
        return _mm512_or_si512(_mm512_srli_epi32(low, 16), high);
    }
#endif

   private:
    const bool half_ = half_on();
};

// GGUF's formats. An element is a level times its block's scale, and of Q4_1 plus its least value: in float32, which has the
// product exactly, then rounded to bfloat16 as if the weight had been made bfloat16 before. So products are the same bits.
template <Kept KEPT>
class Gguf {
   public:
    static constexpr bool SCALED = false;
    static constexpr int64_t BYTES = gguf_bytes(KEPT), AHEAD = 2048;

    struct Tile {  // a block's 16 outputs of one half
        const char* lines;
        Vec scale, least;

        Tile(const char* block, int64_t half)
            : lines(block + scale_bytes(KEPT) + half * (BYTES - scale_bytes(KEPT)) / 2),
              scale(load((const ::half*)block + half * LANES)),
              least(KEPT == Q4_1 ? load((const ::half*)block + (2 + half) * LANES) : Vec{}) {}
        Vec element(int64_t input) const {
            if constexpr (KEPT == Q8_0) {
                return floats(load_words(lines + input / 4 * 64) << int(24 - input % 4 * 8) >> 24) * scale;
            } else {
                const Vec found = level(load_words(lines + input / 8 * 64), int(input % 8 * 4));
                return KEPT == Q4_0 ? found * scale : fma(found, scale, least);
            }
        }
        static Vec level(IVec eight, int shift) {
#if defined(WIDE_REGISTERS)
            const Vec all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const Vec levels = KEPT == Q4_0 ? all - 8.0f : all;
            return (Vec)_mm512_permutexvar_ps(_mm512_srli_epi32((__m512i)eight, unsigned(shift)), (__m512)levels);
#else
            const Vec whole = floats((eight >> shift) & 15);
            return KEPT == Q4_0 ? whole - 8.0f : whole;
#endif
        }
    };

    static float unit(float) { return 1; }
    static float unit(bf16) { return 1; }

    struct Sixteen {
        const Tile tile[2];
        const int64_t first;  // pair

        Sixteen(const char* block, int64_t which) : tile{{block, 0}, {block, 1}}, first(which * 8) {}
        TwoInputs<float> two(int64_t half, int64_t pair) const {
            const int64_t input = (first + pair) * 2;
            return {finite_to_bf16(tile[half].element(input)), finite_to_bf16(tile[half].element(input + 1))};
        }
    };

#if defined(WIDE_REGISTERS)
    void widen(const char* from, bf16* to) const {
        for (int64_t half = 0; half < 2; half++) {
            const Tile tile(from, half);
#pragma GCC unroll 16
            for (int64_t pair = 0; pair < 16; pair++, to += 32)
                _mm512_store_si512(to, in_pairs((__m512)tile.element(pair * 2), (__m512)tile.element(pair * 2 + 1)));
        }
    }
#endif
};

constexpr int64_t CHUNK = 4;  // blocks of a group that meet all rows of a panel, before the next do

// A group's blocks, as they are kept.
template <typename Format>
class Blocks {
   public:
    static constexpr bool SCALED = Format::SCALED;

    // Asks for what will soon be read.
    void ask(int64_t b) const {
        for (int64_t line = 0; line < Format::BYTES; line += 64)
            __builtin_prefetch(tiles_ + b * Format::BYTES + Format::AHEAD + line);
    }
    // Vectors ask twice: all rows of a panel for what is FAR ahead, in the second cache, and the first of them for what is NEAR
    // in the first, for a pair of inputs after the other. (Only once, and a row of int8 takes a sixth longer.)
    static constexpr int64_t SHARE = Format::BYTES / 16, NEAR = 2048, FAR = 16384;
    const char* ahead(int64_t b) const { return tiles_ + b * Format::BYTES + FAR; }
    void ask(int64_t b, int64_t pair) const {
        for (int64_t line = 0; line < SHARE; line += 64)
            __builtin_prefetch(tiles_ + b * Format::BYTES + pair * SHARE + NEAR + line);
    }

   protected:
    const char* tiles_ = nullptr;
};

// 16 inputs of a block, as elements that are multiplied as they lie.
template <typename Element>
struct Lying {
    const Element* from;

    Lying(const Element* block, int64_t which) : from(block + which * TILE / 2) {}
    TwoInputs<Element> two(int64_t half, int64_t pair) const { return TwoInputs<Element>(from + half * TILE + pair * 32); }
};

// Weights that are multiplied as they lie.
template <typename Format, typename Kind>
class AsTheyLie : public Blocks<Format> {
   public:
    using Element = Kind;

    AsTheyLie(const Packed&, bool) {}
    float unit() const { return 1; }
    void begin(const Packed& w, int64_t g) { this->tiles_ = w.group(g); }
    const Element* block(int64_t b, bool) const { return (const Element*)(this->tiles_ + b * Format::BYTES); }
    template <bool FRESH, bool>
    Lying<Element> sixteen(int64_t b, int64_t which) const { return {block(b, FRESH), which}; }
};

// Weights that become bfloat16 or float16 by the first reading of a group, block after block, some blocks before they are
// wanted, since tiles are not loaded from what is still on its way to the cache. Few blocks take turns, which stay in the cache
// next to the processor, the last CHUNK of them for further rows; or all of a group are kept, to be read again from its first on.
template <typename Format, typename Kind>
class Widened : public Blocks<Format> {
   public:
    using Element = Kind;

    Widened(const Packed& w, bool kept)
        : blocks_(w.blocks), turn_(kept ? ~int64_t(0) : TURN - 1), wide_(memory((kept ? blocks_ : TURN) * 2 * TILE)) {}
    void begin(const Packed& w, int64_t g) {
        this->tiles_ = w.group(g);
        for (int64_t b = 0; b < std::min(EARLY, blocks_); b++) widen(b);
    }
    float unit() const { return format_.unit(Element{}); }
    // fresh: the first reading.
    const Element* block(int64_t b, bool fresh) const {
        if (fresh && b + EARLY < blocks_) widen(b + EARLY);
        return place(b);
    }
    template <bool FRESH, bool>
    Lying<Element> sixteen(int64_t b, int64_t which) const { return {block(b, FRESH && !which), which}; }

   private:
    static constexpr int64_t EARLY = 2, TURN = 2 * CHUNK;  // blocks

    Element* place(int64_t b) const { return wide_ + (b & turn_) * 2 * TILE; }
    void widen(int64_t b) const { format_.widen(this->tiles_ + b * Format::BYTES, place(b)); }
    static Element* memory(int64_t size) {  // of this thread
        thread_local std::vector<Element> kept;
        return aligned(kept, size);
    }

    Format format_;
    const int64_t blocks_, turn_;
    Element* const wide_;
};

// Weights that become float32 in registers, on their way from memory. Where more rows will want them (KEPT), they are put
// down in the cache next to the processor, a chunk at a time.
template <typename Format>
class Floats : public Blocks<Format> {
   public:
    using Element = float;

    Floats(const Packed&, bool) : wide_(memory()) {}
    float unit() const { return Format::unit(0.0f); }
    void begin(const Packed& w, int64_t g) { this->tiles_ = w.group(g); }
    template <bool FRESH, bool KEPT>
    auto sixteen(int64_t b, int64_t which) const {
        float* place = wide_ + b % CHUNK * 2 * TILE;
        if constexpr (FRESH)
            return Arriving<KEPT>{{this->tiles_ + b * Format::BYTES, which}, place + which * TILE / 2};
        else
            return Lying<float>(place, which);
    }

   private:
    template <bool KEPT>
    struct Arriving {
        typename Format::Sixteen from;
        float* to;

        TwoInputs<float> two(int64_t half, int64_t pair) const {
            const TwoInputs<float> found = from.two(half, pair);
            float* place = to + half * TILE + pair * 32;
            if (KEPT) put(place, found.even), put(place + 16, found.odd);
            return found;
        }
    };
    static float* memory() {  // of this thread
        thread_local std::vector<float> kept;
        return aligned(kept, CHUNK * 2 * TILE);
    }

    float* const wide_;
};

template <typename Format, typename Kind>
using Source = std::conditional_t<std::is_same<Format, Brain>::value || std::is_same<Format, Half>::value,
                                  AsTheyLie<Format, Kind>, Widened<Format, Kind>>;

}  // namespace
