// Sums of products of bytes: what each set of instructions has for them. They are whole numbers, so any order gives the same.
#pragma once
#include "vector.h"

namespace {

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define UNSIGNED_DOTS 1  // an instruction multiplies bytes from 0 to 255 by signed ones
#endif
#if defined(__AVXVNNI__)
#define DOT_OF_EIGHT _mm256_dpbusd_avx_epi32
#else
#define DOT_OF_EIGHT _mm256_dpbusd_epi32  // the same, of AVX-512
#endif

// Of sixteen outputs the sums of levels times inputs, four of each at a time. MOST: levels are 0 to 15, to 31 or to 63; or any
// signed bytes (-1). Inputs are -127 to 127. At most eight times four of each; `settle` is called after every FIT of them.
template <int MOST>
class Dots {
   public:
    // By how much levels are larger here than as they were given.
    static constexpr int32_t RAISED =
#if defined(UNSIGNED_DOTS)
        MOST < 0 ? 128 : 0;
#else
        0;
#endif

    // Without an instruction for all of it, bytes times bytes are words of 16 bits, of which so many can be added.
    static constexpr int FIT = MOST < 0 ? 1 : 32767 / (2 * 127 * MOST);

    struct Levels {
        IVec bytes;
        Levels() = default;
#if !defined(UNSIGNED_DOTS) && defined(__x86_64__)
        IVec sizes;
        ALWAYS_INLINE explicit Levels(IVec given) : bytes(given), sizes(MOST < 0 ? magnitudes(given) : given) {}
#elif defined(UNSIGNED_DOTS)
        ALWAYS_INLINE explicit Levels(IVec given) : bytes(MOST < 0 ? given ^ int32_t(0x80808080) : given) {}
#else
        ALWAYS_INLINE explicit Levels(IVec given) : bytes(given) {}
#endif
    };

    ALWAYS_INLINE void begin(IVec from) {
        sum_ = from;
        if (IN_WORDS) words_ = IVec{};
    }
    ALWAYS_INLINE void add(const Levels& levels, IVec x) {  // of x all lanes are the same
#if defined(WIDE_REGISTERS) && defined(UNSIGNED_DOTS)
        sum_ = (IVec)_mm512_dpbusd_epi32((__m512i)sum_, (__m512i)levels.bytes, (__m512i)x);
#elif defined(WIDE_REGISTERS)
        __m512i given = (__m512i)x;
        if (MOST < 0) {
            const __mmask64 negative = _mm512_movepi8_mask((__m512i)levels.bytes);
            given = _mm512_mask_sub_epi8(given, negative, _mm512_setzero_si512(), given);
        }
        take((IVec)_mm512_maddubs_epi16((__m512i)levels.sizes, given));
#elif defined(UNSIGNED_DOTS)
        sum_ = by_part<IVec>([](auto s, auto w, auto x) ALWAYS_INLINE {
            return DOT_OF_EIGHT((__m256i)s, (__m256i)w, (__m256i)x);
        }, sum_, levels.bytes, x);
#elif defined(__AVX2__)
        take(by_part<IVec>([](auto sizes, auto w, auto x) ALWAYS_INLINE {
            const __m256i given = MOST < 0 ? _mm256_sign_epi8((__m256i)x, (__m256i)w) : (__m256i)x;
            return _mm256_maddubs_epi16((__m256i)sizes, given);
        }, levels.sizes, levels.bytes, x));
#elif defined(SVE)
        sum_ = by_part<IVec>([](IPart s, IPart w, IPart x) ALWAYS_INLINE {
            return IPart(svdot_s32(s, svreinterpret_s8_s32(w), svreinterpret_s8_s32(x)));
        }, sum_, levels.bytes, x);
#elif defined(__ARM_FEATURE_DOTPROD)
        sum_ = by_part<IVec>([](auto s, auto w, auto x) ALWAYS_INLINE {
            return vdotq_s32((int32x4_t)s, (int8x16_t)w, (int8x16_t)x);
        }, sum_, levels.bytes, x);
#elif defined(__aarch64__)
        sum_ = by_part<IVec>([](auto s, auto w, auto x) ALWAYS_INLINE {
            const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
            const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
            return vaddq_s32((int32x4_t)s, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
        }, sum_, levels.bytes, x);
#endif
    }
    ALWAYS_INLINE void settle() {
        if constexpr (IN_WORDS) sum_ = sum_ + in_lanes(words_), words_ = IVec{};
    }
    ALWAYS_INLINE IVec whole() const {
        if constexpr (IN_WORDS && FIT >= 8) return sum_ + in_lanes(words_);
        return sum_;
    }

   private:
#if defined(UNSIGNED_DOTS) || !defined(__x86_64__)
    static constexpr bool IN_WORDS = false;
    static IVec in_lanes(IVec words) { return words; }
#else
    static constexpr bool IN_WORDS = FIT > 1;

    ALWAYS_INLINE void take(IVec words) {
        IVec& to = IN_WORDS ? words_ : sum_;
        to = IN_WORDS ? add_words(to, words) : to + in_lanes(words);
        // Added here and now: GCC 12 puts off additions whose order does not matter, and has no registers for what waits.
#if !defined(WIDE_REGISTERS)
        each<IVec::PARTS>([&](auto i) ALWAYS_INLINE {
            auto& part = to.part[i];  // clang captures nothing that only asm names
            asm("" : "+x"(part));
        });
#endif
    }
#if defined(WIDE_REGISTERS)
    ALWAYS_INLINE static IVec magnitudes(IVec bytes) { return (IVec)_mm512_abs_epi8((__m512i)bytes); }
    ALWAYS_INLINE static IVec add_words(IVec a, IVec b) { return (IVec)_mm512_add_epi16((__m512i)a, (__m512i)b); }
    ALWAYS_INLINE static IVec in_lanes(IVec words) { return (IVec)_mm512_madd_epi16((__m512i)words, _mm512_set1_epi16(1)); }
#else
    ALWAYS_INLINE static IVec magnitudes(IVec bytes) {
        return by_part<IVec>([](auto b) ALWAYS_INLINE { return _mm256_abs_epi8((__m256i)b); }, bytes);
    }
    ALWAYS_INLINE static IVec add_words(IVec a, IVec b) {
        return by_part<IVec>([](auto a, auto b) ALWAYS_INLINE { return _mm256_add_epi16((__m256i)a, (__m256i)b); }, a, b);
    }
    ALWAYS_INLINE static IVec in_lanes(IVec words) {
        return by_part<IVec>([](auto w) ALWAYS_INLINE { return _mm256_madd_epi16((__m256i)w, _mm256_set1_epi16(1)); }, words);
    }
#endif
#endif

    IVec sum_, words_;
};

}  // namespace
