// Which instructions multiply, and rounding to what they multiply. They round differently, and answers are repeated to
// the bit after a crash: so a machine always uses the same ones, by what it is and not by how fast it was.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vector.h"

namespace {

// FLOATS: AVX-512 (F, BW, DQ, VL); both operands are widened to float32. PAIRS: AVX512-BF16, which multiplies pairs of
// bfloat16. TILES: AMX, 16 x 16 x 32 of them at once. HALVES: AVX512-FP16, 32 float16 at once; the rest as floats.
enum Instructions { FLOATS, PAIRS, TILES, HALVES };

// 32 bfloat16 -> the 16 of even numbers and the 16 of odd ones.
inline __m512 evens(__m512i x) { return (__m512)_mm512_slli_epi32(x, 16); }
inline __m512 odds(__m512i x) { return (__m512)_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000))); }

// sum += x[2i] y[2i] + x[2i + 1] y[2i + 1]; and 16 floats to bfloat16, to nearest, ties to even, subnormal ones to zero.
#if defined(__AVX512BF16__)
constexpr bool PAIRS_BUILT = true;
inline __m512 add_pairs(__m512 sum, __m512i x, __m512i y) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)y); }
inline __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
constexpr bool PAIRS_BUILT = false;
inline __m512 add_pairs(__m512 sum, __m512i x, __m512i y) {
    return _mm512_fmadd_ps(evens(x), evens(y), _mm512_fmadd_ps(odds(x), odds(y), sum));
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

// 16 floats each -> pairs of bfloat16, rounded so.
inline __m512i in_pairs(__m512 even, __m512 odd) {
#if defined(__AVX512BF16__)
    const __m512i order = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                            0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
#else
    const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded(odd)), 16);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(rounded(even)), high);
#endif
}

#if defined(__AVX512FP16__)
constexpr bool HALVES_BUILT = true;
inline __m512i add_halves(__m512i sum, const half* x, __m512i y) {  // sum += x y
    asm("vfmadd231ph %2%{1to32%}, %1, %0" : "+v"(sum) : "v"(y), "m"(*x));  // with the intrinsic GCC 12 copies the sums
    return sum;
}
inline __m512i halves(__m512i words) { return (__m512i)_mm512_cvtepi16_ph(words); }
inline __m512i times(__m512i x, __m512i y) { return (__m512i)_mm512_mul_ph((__m512h)x, (__m512h)y); }
inline __m512i plus(__m512i x, __m512i y) { return (__m512i)_mm512_add_ph((__m512h)x, (__m512h)y); }
#else  // none is called
constexpr bool HALVES_BUILT = false;
inline __m512i add_halves(__m512i sum, const half*, __m512i) { return sum; }
inline __m512i halves(__m512i words) { return words; }
inline __m512i times(__m512i x, __m512i) { return x; }
inline __m512i plus(__m512i x, __m512i) { return x; }
#endif

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
constexpr bool TILES_BUILT = true;
#else
constexpr bool TILES_BUILT = false;
#endif

inline bool tiles_allowed() {  // the kernel wants to be asked before a process uses tiles
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return allowed;
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
    if (!__builtin_cpu_is("intel")) return there_are(PAIRS) ? PAIRS : FLOATS;
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
    __m512 even, odd;

    TwoInputs(__m512 even, __m512 odd) : even(even), odd(odd) {}
    explicit TwoInputs(const float* w) : even(_mm512_loadu_ps(w)), odd(_mm512_loadu_ps(w + 16)) {}
    explicit TwoInputs(const bf16* w) : even(evens(_mm512_loadu_si512(w))), odd(odds(_mm512_loadu_si512(w))) {}
    __m512 times(const float* x, __m512 sum) const {
        sum = _mm512_fmadd_ps(_mm512_set1_ps(x[0]), even, sum);
        return _mm512_fmadd_ps(_mm512_set1_ps(x[1]), odd, sum);
    }
};

template <>
struct TwoInputs<bf16> {
    __m512i both;

    explicit TwoInputs(const bf16* w) : both(_mm512_loadu_si512(w)) {}
    __m512 times(const bf16* x, __m512 sum) const {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return add_pairs(sum, _mm512_set1_epi32(pair), both);
    }
};

inline __m512 widened(__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
inline void put(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, rounded(x)); }
inline void put(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void put(bf16* to, __m512 low, __m512 high) {  // 32 floats
    put(to, low);
    put(to + 16, high);
}

}  // namespace
