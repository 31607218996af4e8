// Sums of products of bytes of two rows at once. ARM's i8mm multiplies eight bytes of two rows by eight of two outputs in one
// instruction (`smmla`). They are whole numbers, as in dots.h.
#pragma once
#include "dots.h"

namespace {

#if defined(SVE) ? defined(__ARM_FEATURE_SVE_MATMUL_INT8) : defined(__ARM_FEATURE_MATMUL_INT8)
#define DOTS_OF_TWO 1

class DotsOfTwo {
   public:
    // Of sixteen outputs eight levels: two lines of four, woven.
    struct Levels {
        IVec of[2];  // eight outputs
        ALWAYS_INLINE Levels(const IVec& first, const IVec& second) { weave<1>(first, second, of); }
    };

    ALWAYS_INLINE void begin(const IVec& row, const IVec& next) { weave<2>(row, next, sum_); }
    ALWAYS_INLINE void add(const Levels& levels, const int8_t* row, const int8_t* next) {  // eight inputs of each
        const IPart inputs = both(row, next);
        each<2>([&](auto i) ALWAYS_INLINE {
            sum_[i] = by_part<IVec>([inputs](IPart s, IPart w) ALWAYS_INLINE { return multiplied(s, inputs, w); }, sum_[i], levels.of[i]);
        });
    }
    ALWAYS_INLINE IVec whole(bool next) const {
        IVec to;
        each<IVec::PARTS>([&](auto i) ALWAYS_INLINE {
            constexpr int FIRST = 2 * i, HALF = IVec::PARTS;
            to.part[i] = apart(sum_[FIRST / HALF].part[FIRST % HALF], sum_[(FIRST + 1) / HALF].part[(FIRST + 1) % HALF], next);
        });
        return to;
    }

   private:
#if defined(SVE)
    ALWAYS_INLINE static IPart both(const int8_t* row, const int8_t* next) {
        int64_t of_row, of_next;
        std::memcpy(&of_row, row, 8), std::memcpy(&of_next, next, 8);
        return svreinterpret_s32_s64(svtrn1_s64(svdup_s64(of_row), svdup_s64(of_next)));
    }
    ALWAYS_INLINE static IPart multiplied(IPart sum, IPart rows, IPart levels) {
        return svmmla_s32(sum, svreinterpret_s8_s32(rows), svreinterpret_s8_s32(levels));
    }
    ALWAYS_INLINE static IPart apart(IPart a, IPart b, bool next) {
        const svint64_t c = svreinterpret_s64_s32(a), d = svreinterpret_s64_s32(b);
        return next ? IPart(svreinterpret_s32_s64(svuzp2_s64(c, d))) : IPart(svreinterpret_s32_s64(svuzp1_s64(c, d)));
    }
#else
    ALWAYS_INLINE static IPart both(const int8_t* row, const int8_t* next) {
        return (IPart)vcombine_s8(vld1_s8(row), vld1_s8(next));
    }
    ALWAYS_INLINE static IPart multiplied(IPart sum, IPart rows, IPart levels) {
        return (IPart)vmmlaq_s32((int32x4_t)sum, (int8x16_t)rows, (int8x16_t)levels);
    }
    ALWAYS_INLINE static IPart apart(IPart a, IPart b, bool next) {
        return (IPart)(next ? vuzp2q_s64((int64x2_t)a, (int64x2_t)b) : vuzp1q_s64((int64x2_t)a, (int64x2_t)b));
    }
#endif

    IVec sum_[2];  // of eight outputs each, of two in turn: those of the row, those of the next
};
#endif

}  // namespace
