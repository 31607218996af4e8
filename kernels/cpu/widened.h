// Where a product reads a group's weights, a block of 32 inputs x 32 outputs after the other, as two tiles of bfloat16.
#pragma once
#include <vector>

#include "packed.h"

namespace {

// Bytes: where the weights are prefetched; further brings less (measured).
constexpr int64_t AHEAD = 1024, AHEAD_INT8 = 2048;

inline void prefetch_lines(const void* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) _mm_prefetch((const char*)from + at, _MM_HINT_T0);
}

#if defined(__AVX512FP16__)
constexpr bool HALF_BUILT = true;
inline __m512i halves(__m512i words) { return (__m512i)_mm512_cvtepi16_ph(words); }
#else
constexpr bool HALF_BUILT = false;
inline __m512i halves(__m512i words) { return words; }
#endif

inline bool& half_on() {  // int8 is widened through float16: switched off by tests, which want to see both ways
    static bool on = HALF_BUILT;
    return on;
}

// Weights that are bfloat16. fresh: they come from memory and are asked for ahead; for a prompt's next rows that would
// only take time. readings: how often a group's blocks are asked for.
class AsTheyLie {
   public:
    static constexpr bool SCALED = false;

    AsTheyLie(const Packed&, int64_t) {}
    float unit() const { return 1; }
    void begin(const Packed& w, int64_t g) { tiles_ = w.group<bf16>(g); }
    const bf16* block(int64_t b, bool fresh) const {
        const bf16* at = tiles_ + b * 2 * TILE;
        if (fresh) prefetch_lines((const char*)at + AHEAD, 2 * TILE * sizeof(bf16));
        return at;
    }

   private:
    const bf16* tiles_ = nullptr;
};

// Weights that are int8. The first reading of a group, block after block, widens them, some blocks before they are wanted,
// since tiles are not loaded from what is still on its way to the cache. Further readings have all blocks; where there is
// only one, few blocks take turns, which stay in the cache next to the processor.
//
// Bfloat16 holds them exactly, times a power of two that makes it cheap: `unit` takes it out of the sum again. Words that
// have the int8 as their upper byte become float16; three bits further down their exponent is a bfloat16's, which is less by
// 112: 2^8 2^-112. So a product of an input and an integer below 2^-22 is lost, as small as a tile's arithmetic has it;
// inputs of a millionth would have to matter. Without float16 words become floats, in the upper half of a lane: 2^24.
class Widened {
   public:
    static constexpr bool SCALED = true;

    Widened(const Packed& w, int64_t readings)
        : half_(half_on()), blocks_(w.blocks), turn_(readings > 1 ? ~int64_t(0) : TURN - 1),
          wide_(memory((readings > 1 ? blocks_ : TURN) * 2 * TILE)) {}
    void begin(const Packed& w, int64_t g) {
        tiles_ = w.group<int8_t>(g);
        for (int64_t b = 0; b < std::min(EARLY, blocks_); b++) widen(b);
    }
    float unit() const { return half_ ? 0x1p104f : 0x1p-24f; }
    const bf16* block(int64_t b, bool fresh) const {
        if (fresh && b + EARLY < blocks_) widen(b + EARLY);
        return place(b);
    }

   private:
    static constexpr int64_t EARLY = 2, TURN = 4;  // blocks

    bf16* place(int64_t b) const { return wide_ + (b & turn_) * 2 * TILE; }

    void widen(int64_t b) const {
        const int8_t* from = tiles_ + b * 2 * TILE;
        bf16* to = place(b);
        prefetch_lines(from + AHEAD_INT8, 2 * TILE);
        for (int64_t i = 0; i < 2 * TILE; i += 64) {
            const __m512i bytes = _mm512_load_si512(from + i), zero = _mm512_setzero_si512();
            const __m512i first = _mm512_unpacklo_epi8(zero, bytes), second = _mm512_unpackhi_epi8(zero, bytes);
            _mm512_store_si512(to + i, half_ ? through_halves(first) : through_floats(first));
            _mm512_store_si512(to + i + 32, half_ ? through_halves(second) : through_floats(second));
        }
    }
    static __m512i through_halves(__m512i words) {
        const __m512i sign_and_rest = _mm512_set1_epi16(short(0x8fff));
        return _mm512_and_si512(_mm512_srai_epi16(halves(words), 3), sign_and_rest);
    }
    static __m512i through_floats(__m512i words) {  // two of a lane
        const __m512i upper = _mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000)));
        const __m512i low = (__m512i)_mm512_cvtepi32_ps(_mm512_slli_epi32(words, 16));
        const __m512i high = (__m512i)_mm512_cvtepi32_ps(upper);
        return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
    }

    static bf16* memory(int64_t size) {  // of this thread
        thread_local std::vector<bf16> kept;
        if (int64_t(kept.size()) < size + 32) kept.resize(size + 32);
        return (bf16*)((uintptr_t(kept.data()) + 63) & ~uintptr_t(63));
    }

    const int8_t* tiles_ = nullptr;
    const bool half_;
    const int64_t blocks_, turn_;
    bf16* const wide_;
};

}  // namespace
