// Where a product reads a group's weights in bfloat16, a block of 32 inputs x 32 outputs after the other. As two tiles: of
// bfloat16, [16 pairs of inputs][16 outputs][2], or of float32, [32 inputs][16 outputs]; vectors read 16 inputs of both at a time.
// Or of float16, as [32 inputs][32 outputs].
#pragma once
#include "rows.h"

namespace {

constexpr int64_t CHUNK = 4;  // blocks of a group that meet all rows of a panel, before the next do
// Vectors ask twice for what they will read: all rows of a panel for what is FAR ahead, in the second cache, and the first of
// them for what is NEAR in the first. (Only once, and a row of int8 takes a sixth longer. In bytes.)
constexpr int64_t NEAR = 2048, FAR = 16384;
// A single row of a format whose product takes less time than reading it may ask for nothing: the processor then fetches ahead by
// itself. For that each group is read from its first byte to its last, in order. Which formats, and how many groups side by side
// at most:
#if defined(WIDE_REGISTERS)
constexpr int SIDE_BY_SIDE = 1;
constexpr bool read_in_order(Kept kept) { return kept != BFLOAT16; }
#elif defined(__AVX2__)
constexpr int SIDE_BY_SIDE = 4;
constexpr bool read_in_order(Kept kept) { return kept == BFLOAT16 || layout_of(kept).bits == 8; }
#elif defined(SVE) && __ARM_FEATURE_SVE_BITS == 512
constexpr int SIDE_BY_SIDE = 4;  // not measured: on A64FX a sum waits nine cycles for the one before, and a group has two
constexpr bool read_in_order(Kept kept) { return kept == BFLOAT16; }
#else
constexpr int SIDE_BY_SIDE = 1;
constexpr bool read_in_order(Kept) { return false; }  // not measured
#endif
// And how many on this processor. Of few bits AMD's Zen 4 (the first of AMD with AVX-512) reads most with one, Zen 3 with four.
// Intel's with AVX-512 read more where they are asked (0).
inline int side_by_side(Kept kept) {
#if defined(__x86_64__)
    static const bool one = __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
    if (one && kept != BFLOAT16) return 1;
#endif
    return SIDE_BY_SIDE > 1 ? SIDE_BY_SIDE : 0;
}

// A group's blocks, as they are kept.
class Blocks {
   public:
    static constexpr int64_t BYTES = 2 * TILE * sizeof(bf16), SHARE = BYTES / 16;  // of a block, of a pair of inputs

    explicit Blocks(const char* group) : group_(group) {}
    const char* ahead(int64_t b) const { return group_ + b * BYTES + FAR; }
    void ask(int64_t b, int64_t pair) const {
        for (int64_t line = 0; line < SHARE; line += 64) __builtin_prefetch(group_ + b * BYTES + pair * SHARE + NEAR + line);
    }

   protected:
    const char* const group_;
};

// 16 inputs of a block, as elements that are multiplied as they lie.
template <typename Element>
struct Lying {
    const Element* from;

    Lying(const Element* block, int64_t which) : from(block + which * TILE / 2) {}
    TwoInputs<Element> two(int64_t half, int64_t pair) const { return TwoInputs<Element>(from + half * TILE + pair * 32); }
};

// Weights that are multiplied as they lie.
template <typename Kind>
struct AsTheyLie : Blocks {
    using Element = Kind;
    using Blocks::Blocks;

    const Element* block(int64_t b) const { return (const Element*)(group_ + b * BYTES); }
    template <bool, bool>
    Lying<Element> sixteen(int64_t b, int64_t which) const { return {block(b), which}; }
};

// Bfloat16 that become float32 in registers, on their way from memory. Where more rows will want them (KEPT), they are put
// down in the cache next to the processor, a chunk at a time.
class Floats : public Blocks {
   public:
    using Element = float;

    explicit Floats(const char* group) : Blocks(group), wide_(memory()) {}
    template <bool FRESH, bool KEPT>
    auto sixteen(int64_t b, int64_t which) const {
        float* place = wide_ + b % CHUNK * 2 * TILE + which * TILE / 2;
        if constexpr (FRESH)
            return Arriving<KEPT>{(const bf16*)(group_ + b * BYTES) + which * TILE / 2, place};
        else
            return Lying<float>(place, 0);
    }

   private:
    template <bool KEPT>
    struct Arriving {
        const bf16* from;
        float* to;

        TwoInputs<float> two(int64_t half, int64_t pair) const {
            const int64_t at = half * TILE + pair * 32;
            const TwoInputs<float> found(from + at);
            if (KEPT) put(to + at, found.even), put(to + at + 16, found.odd);
            return found;
        }
    };
    static float* memory() {  // of this thread
        thread_local std::vector<float> kept;
        return aligned(kept, CHUNK * 2 * TILE);
    }

    float* const wide_;
};

}  // namespace
