// How weights in few bits lie: levels, which are whole numbers, and scales that some of an output's inputs share.
//
// A block is 32 inputs of 32 outputs. Its scales come first, then the levels of the first 16 outputs and those of the others, in
// lines of 64 bytes: a word for each output, of four inputs. A level of 8 bits is a byte, signed. Of 4 bits a byte has two: the
// lower halves of a word are its first four inputs, the upper halves the next four. Of 5 and 6 bits the lower four lie so, and
// lines of the others follow: a word of those has 32 or 16 inputs, the first four in the lowest bits of its bytes.
// Some levels are places in a table. K-quants and IQ4_XS scale their blocks' scales: each eight blocks follow 32 float16, of Q4_K
// and Q5_K 64.
#pragma once
#include <cmath>

#include "vector.h"

namespace {

constexpr int64_t GROUP = 32;       // outputs of a group
constexpr int64_t TOGETHER_K = 8;   // blocks that have a scale for their scales

enum Kept { BFLOAT16, INT8, INT4, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K, Q5_0, Q5_1, Q5_K, IQ4_NL, IQ4_XS, MXFP4 };
constexpr int FORMATS = MXFP4 + 1;

constexpr int8_t UNEVEN[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice what the floats are

struct Layout {
    int64_t bits;        // of a level
    int32_t zero;        // the level that means 0
    int64_t per_scale;   // inputs
    bool least;          // there are least values, which scaled levels are added to
    bool scaled;         // finished sums are multiplied by a scale of their output
    int64_t scale_bytes; // of a block's scales and least values
    int64_t super_bytes; // before each TOGETHER_K blocks
    int64_t file_bytes;  // of one output's inputs that share a block in the file; 0: there is none
    int64_t file_inputs;
    const int8_t* table = nullptr;  // what levels mean; null: themselves

    constexpr int64_t half_bytes() const { return bits * 64; }  // of 16 outputs' levels
    constexpr int64_t block_bytes() const { return scale_bytes + 2 * half_bytes(); }
    constexpr int64_t blocks_bytes(int64_t blocks) const { return blocks * block_bytes() + blocks / TOGETHER_K * super_bytes; }
};

constexpr Layout layout_of(Kept kept) {
    switch (kept) {
        case INT8: return {8, 0, 32, false, true, 0, 0, 0, 0};
        case INT4: return {4, 8, 16, false, true, 64, 0, 0, 0};
        case Q8_0: return {8, 0, 32, false, false, 64, 0, 34, 32};
        case Q4_0: return {4, 8, 32, false, false, 64, 0, 18, 32};
        case Q4_1: return {4, 0, 32, true, false, 128, 0, 20, 32};
        case Q4_K: return {4, 0, 32, true, false, 64, 128, 144, 256};
        case Q6_K: return {6, 32, 16, false, false, 64, 64, 210, 256};
        case Q5_0: return {5, 16, 32, false, false, 64, 0, 22, 32};
        case Q5_1: return {5, 0, 32, true, false, 128, 0, 24, 32};
        case Q5_K: return {5, 0, 32, true, false, 64, 128, 176, 256};
        case IQ4_NL: return {4, 0, 32, false, false, 64, 0, 18, 32, UNEVEN};
        case IQ4_XS: return {4, 0, 32, false, false, 32, 64, 136, 256, UNEVEN};
        case MXFP4: return {4, 0, 32, false, false, 32, 0, 17, 32, E2M1};
        default: return {};
    }
}

// A step of int4 from its code: the bits of a float, with the rest of the exponent put in.
inline float step_of(uint8_t code) {
    const uint32_t bits = uint32_t(code >> 7) << 31 | ((code & 127u) + (120u << 4)) << 19;
    float step;
    std::memcpy(&step, &bits, sizeof step);
    return step;
}

// An element of a block: an output and an input of its 32 each. `super`: what precedes the block and its neighbours.
struct Element {
    Kept kept;
    char *super, *block;
    int64_t output, input;

    int level() const {
        const Layout l = layout_of(kept);
        if (l.bits == 8) return int8_t(lower());
        const int low = lower() >> shift() & 15;
        return l.bits == 4 ? low : low | (upper() >> upper_shift() & ((1 << (l.bits - 4)) - 1)) << 4;
    }
    void put_level(int level) const {  // where zeros were
        const Layout l = layout_of(kept);
        if (l.bits == 8) return void(lower() = uint8_t(level));
        lower() |= uint8_t((level & 15) << shift());
        if (l.bits > 4) upper() |= uint8_t(level >> 4 << upper_shift());
    }

    half& scale() const { return ((half*)block)[output]; }
    half& least() const { return ((half*)block)[GROUP + output]; }
    uint8_t& code() const { return ((uint8_t*)block)[output / 16 * 32 + input / 16 * 16 + output % 16]; }  // of 16 inputs
    uint8_t& small_scale() const { return ((uint8_t*)block)[output]; }  // of 32 inputs
    uint8_t& small_least() const { return ((uint8_t*)block)[GROUP + output]; }
    half& super_scale() const { return ((half*)super)[output]; }
    half& super_least() const { return ((half*)super)[GROUP + output]; }

    // From a block as a GGUF file has it, of which this is input `at`.
    void set(const uint8_t* from, int64_t at) const {
        const int64_t i = at / 32;  // of the file's block, which of its 32 inputs
        auto four = [&](int64_t place) { return from[place + at % 16] >> at % 32 / 16 * 4 & 15; };
        auto one = [&](int64_t place) { return from[place + at / 8] >> at % 8 & 1; };
        switch (kept) {
            case Q8_0:
                std::memcpy(&scale(), from, 2);
                return put_level(int8_t(from[2 + at]));
            case Q4_0:
            case IQ4_NL:
                std::memcpy(&scale(), from, 2);
                return put_level(four(2));
            case Q4_1:
                std::memcpy(&scale(), from, 2), std::memcpy(&least(), from + 2, 2);
                return put_level(four(4));
            case Q5_0:
                std::memcpy(&scale(), from, 2);
                return put_level(four(6) | one(2) << 4);
            case Q5_1:
                std::memcpy(&scale(), from, 2), std::memcpy(&least(), from + 2, 2);
                return put_level(four(8) | one(4) << 4);
            case MXFP4:
                small_scale() = from[0];
                return put_level(four(1));
            case IQ4_XS:  // scales of six bits, the lower four apart from the upper two
                std::memcpy(&super_scale(), from, 2);
                small_scale() = uint8_t(((from[4 + i / 2] >> i % 2 * 4 & 15) | (from[2 + i / 4] >> i % 4 * 2 & 3) << 4) - 32);
                return put_level(four(8 + i * 16));
            case Q4_K:
            case Q5_K: {
                std::memcpy(&super_scale(), from, 2), std::memcpy(&super_least(), from + 2, 2);
                const uint8_t* six = from + 4;  // of eight scales and eight least values six bits each
                small_scale() = i < 4 ? six[i] & 63 : (six[i + 4] & 15) | six[i - 4] >> 6 << 4;
                small_least() = i < 4 ? six[i + 4] & 63 : six[i + 4] >> 4 | six[i] >> 6 << 4;
                const int low = from[(kept == Q4_K ? 16 : 48) + at / 64 * 32 + at % 32] >> i % 2 * 4 & 15;
                return put_level(kept == Q4_K ? low : low | (from[16 + at % 32] >> i & 1) << 4);
            }
            case Q6_K: {
                const int64_t of = at % 128, low = at / 128 * 64 + of % 64, high = 128 + at / 128 * 32 + of % 32;
                std::memcpy(&super_scale(), from + 208, 2);
                code() = from[192 + at / 16];
                return put_level((from[low] >> of / 64 * 4 & 15) | (from[high] >> of / 32 * 2 & 3) << 4);
            }
            default: return;
        }
    }
    // What it means, over the scale of its output: rounded once, from float32.
    float value() const {
        const Layout l = layout_of(kept);
        const float from_zero = float(l.table ? l.table[level()] : level() - l.zero);
        switch (kept) {
            case INT4: return from_zero * step_of(code());
            case Q8_0:
            case Q4_0:
            case Q5_0:
            case IQ4_NL: return from_zero * widen(scale());
            case Q4_1:
            case Q5_1: return std::fma(from_zero, widen(scale()), widen(least()));
            case Q4_K:
            case Q5_K:
                return std::fma(from_zero, float(small_scale()) * widen(super_scale()),
                                -float(small_least()) * widen(super_least()));
            case Q6_K: return from_zero * (float(int8_t(code())) * widen(super_scale()));
            case IQ4_XS: return from_zero * (float(int8_t(small_scale())) * widen(super_scale()));
            case MXFP4: return std::ldexp(from_zero, int(small_scale()) - 128);
            default: return from_zero;
        }
    }

   private:
    char* half_of() const {
        const Layout l = layout_of(kept);
        return block + l.scale_bytes + output / 16 * l.half_bytes();
    }
    uint8_t& lower() const {
        const int64_t line = layout_of(kept).bits == 8 ? input / 4 : input / 8;
        return ((uint8_t*)half_of())[line * 64 + output % 16 * 4 + input % 4];
    }
    int shift() const { return int(input / 4 % 2 * 4); }
    // Of the bits above four, with 5 bits of one line, with 6 of two.
    int above() const { return int(layout_of(kept).bits - 4); }
    uint8_t& upper() const {
        return ((uint8_t*)half_of())[4 * 64 + input * above() / 32 * 64 + output % 16 * 4 + input % 4];
    }
    int upper_shift() const { return int(input / 4 * above() % 8); }
};

}  // namespace
