// Sums of products of bytes of two rows at once. ARM's i8mm multiplies eight bytes of two rows by eight of two outputs in one
// instruction (`smmla`). They are whole numbers, as in dots.h.
#pragma once
#include "dots.h"

namespace {

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define DOTS_OF_TWO 1

class DotsOfTwo {
   public:
    // Of sixteen outputs eight levels: two lines of four, woven.
    struct Levels {
        int8x16_t of[8];  // two outputs
        ALWAYS_INLINE Levels(const IVec& first, const IVec& second) {
            each<4>([&](auto i) ALWAYS_INLINE {
                const int32x4_t a = (int32x4_t)first.part[i], b = (int32x4_t)second.part[i];
                of[2 * i] = (int8x16_t)vzip1q_s32(a, b);
                of[2 * i + 1] = (int8x16_t)vzip2q_s32(a, b);
            });
        }
    };

    ALWAYS_INLINE void begin(const IVec& row, const IVec& next) {
        each<4>([&](auto i) ALWAYS_INLINE {
            const int64x2_t a = (int64x2_t)row.part[i], b = (int64x2_t)next.part[i];
            sum_[2 * i] = (int32x4_t)vzip1q_s64(a, b);
            sum_[2 * i + 1] = (int32x4_t)vzip2q_s64(a, b);
        });
    }
    ALWAYS_INLINE void add(const Levels& levels, const int8_t* row, const int8_t* next) {  // eight inputs of each
        const int8x16_t inputs = vcombine_s8(vld1_s8(row), vld1_s8(next));
        each<8>([&](auto i) ALWAYS_INLINE { sum_[i] = vmmlaq_s32(sum_[i], inputs, levels.of[i]); });
    }
    ALWAYS_INLINE IVec whole(bool next) const {
        IVec to;
        each<4>([&](auto i) ALWAYS_INLINE {
            const int64x2_t a = (int64x2_t)sum_[2 * i], b = (int64x2_t)sum_[2 * i + 1];
            to.part[i] = (IPart)(next ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
        });
        return to;
    }

   private:
    int32x4_t sum_[8];  // of two outputs each: those of the row, those of the next
};
#endif

}  // namespace
