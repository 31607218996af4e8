// Which instructions multiply, and rounding to what they multiply. They round differently, and answers are repeated to
// the bit after a crash: so a machine always uses the same ones, by what it is and not by how fast it was.
#pragma once
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vector.h"

namespace {

// FLOATS: any set; both operands are widened to float32. The rest need AVX-512 (F, BW, DQ, VL). PAIRS: AVX512-BF16, which multiplies pairs of
// bfloat16. TILES: AMX, 16 x 16 x 32 of them at once. HALVES: AVX512-FP16, 32 float16 at once; the rest as floats.
enum Instructions { FLOATS, PAIRS, TILES, HALVES };

// 32 bfloat16 -> the 16 of even numbers and the 16 of odd ones.
inline Vec evens(IVec x) { return (Vec)(x << 16); }
inline Vec odds(IVec x) { return (Vec)(x & int32_t(0xffff0000)); }

#if defined(WIDE_REGISTERS)
// sum += x[2i] y[2i] + x[2i + 1] y[2i + 1]; and 16 floats to bfloat16, to nearest, ties to even, subnormal ones to zero.
#if defined(__AVX512BF16__)
constexpr bool PAIRS_BUILT = true;
inline __m512 add_pairs(__m512 sum, __m512i x, __m512i y) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }
inline __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
constexpr bool PAIRS_BUILT = false;
inline __m512 add_pairs(__m512 sum, __m512i x, __m512i y) {
    return (__m512)fma(evens((IVec)x), evens((IVec)y), fma(odds((IVec)x), odds((IVec)y), (Vec)sum));
}
inline __m256i rounded(__m512 x) {  // to the bit what the instruction says
    const __m512i bits = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i all = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    all = _mm512_mask_or_epi32(all, nan, bits, _mm512_set1_epi32(0x400000));
    const __mmask16 subnormal = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    all = _mm512_mask_and_epi32(all, subnormal, bits, _mm512_set1_epi32(int(0x80000000)));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16));
}
#endif

#if defined(__AVX512FP16__)
constexpr bool HALVES_BUILT = true;
inline __m512i add_halves(__m512i sum, const half* x, __m512i y) {  // sum += x y
    asm("vfmadd231ph %2%{1to32%}, %1, %0" : "+v"(sum) : "v"(y), "m"(*x));  // with the intrinsic GCC 12 copies the sums
    return sum;
}
inline __m512i plus(__m512i x, __m512i y) { return (__m512i)_mm512_add_ph((__m512h)x, (__m512h)y); }
#else  // none is called
constexpr bool HALVES_BUILT = false;
inline __m512i add_halves(__m512i sum, const half*, __m512i) { return sum; }
inline __m512i plus(__m512i x, __m512i) { return x; }
#endif

inline Vec add_pairs(Vec sum, IVec x, IVec y) { return (Vec)add_pairs((__m512)sum, (__m512i)x, (__m512i)y); }
inline Vec widened(__m256i x) { return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
inline Vec round_to_bf16(Vec x) { return widened(rounded((__m512)x)); }
inline void put(bf16* to, Vec x) { _mm256_storeu_si256((__m256i*)to, rounded((__m512)x)); }
#else
constexpr bool PAIRS_BUILT = false, HALVES_BUILT = false;
inline Vec add_pairs(Vec sum, IVec x, IVec y) { return fma(evens(x), evens(y), fma(odds(x), odds(y), sum)); }
inline Vec round_to_bf16(Vec x) {  // to the bit what the instruction of AVX-512 gives
    const IVec bits = (IVec)x, magnitude = bits & 0x7fffffff;
    const Vec nearest = (Vec)(bits + 0x7fff + ((bits >> 16) & 1)), zero = (Vec)(bits & int32_t(0x80000000));
    const Vec normal = select(magnitude > 0x7fffff, nearest, zero);
    return (Vec)((IVec)select(magnitude > 0x7f800000, (Vec)(bits | 0x400000), normal) & int32_t(0xffff0000));
}
inline void put(bf16* to, Vec x) { store_upper(to, (IVec)round_to_bf16(x)); }
#endif

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
constexpr bool TILES_BUILT = true;
#else
constexpr bool TILES_BUILT = false;
#endif

inline bool tiles_allowed() {  // the kernel wants to be asked before a process uses tiles
#if defined(__x86_64__) && defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return allowed;
#else
    return false;
#endif
}

inline bool there_are(Instructions kind) {
    switch (kind) {
        case FLOATS: return true;
        case PAIRS: return PAIRS_BUILT;
        case TILES: return TILES_BUILT && tiles_allowed();
        case HALVES: return HALVES_BUILT;
    }
    return false;
}

// Intel's cores multiply pairs at a quarter of the rate of floats, so half as fast; AMD's are twice as fast with pairs.
inline Instructions best() {
    if (there_are(TILES)) return TILES;
    if (!PAIRS_BUILT && !HALVES_BUILT) return FLOATS;
#if defined(__x86_64__)
    if (!__builtin_cpu_is("intel")) return there_are(PAIRS) ? PAIRS : FLOATS;
#endif
    return there_are(HALVES) ? HALVES : FLOATS;
}

inline Instructions& instructions() {  // changed by tests, which want to see all
    static Instructions used = best();
    return used;
}

// 16 outputs' weights of two inputs, and what they are multiplied with: Element says with which instructions.
template <typename Element> struct TwoInputs;

template <>
struct TwoInputs<float> {
    Vec even, odd;

    TwoInputs() = default;
    explicit TwoInputs(const float* w) : even(load(w)), odd(load(w + 16)) {}
    explicit TwoInputs(const bf16* w) : even(evens(load_words(w))), odd(odds(load_words(w))) {}
    Vec times(const float* x, Vec sum) const { return fma(splat(x[1]), odd, fma(splat(x[0]), even, sum)); }
};

template <>
struct TwoInputs<bf16> {
    IVec both;

    TwoInputs() = default;
    explicit TwoInputs(const bf16* w) : both(load_words(w)) {}
    Vec times(const bf16* x, Vec sum) const {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return add_pairs(sum, splat(pair), both);
    }
};

inline void put(float* to, Vec x) { store(to, x); }
inline void put(bf16* to, Vec low, Vec high) {  // 32 floats
    put(to, low);
    put(to + 16, high);
}

}  // namespace
