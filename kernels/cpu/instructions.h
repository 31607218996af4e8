// Which instructions multiply, and rounding to what they multiply. They round differently, and answers are repeated to
// the bit after a crash: so a machine always uses the same ones, by what it is and not by how fast it was.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "vector.h"

namespace {

// FLOATS: any AVX-512; both operands are widened to float32. PAIRS: AVX512-BF16, which multiplies pairs of bfloat16.
// TILES: AMX, 16 x 16 x 32 of them at once.
enum Instructions { FLOATS, PAIRS, TILES };

#if defined(__AVX512BF16__)
constexpr bool PAIRS_BUILT = true;
#else
constexpr bool PAIRS_BUILT = false;
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
    return kind == TILES ? TILES_BUILT && tiles_allowed() : kind == PAIRS ? PAIRS_BUILT : true;
}

// Intel's cores multiply pairs at a quarter of the rate of floats, so half as fast; AMD's are twice as fast with pairs.
inline Instructions best() {
    return there_are(TILES) ? TILES : there_are(PAIRS) && !__builtin_cpu_is("intel") ? PAIRS : FLOATS;
}

inline Instructions& instructions() {  // changed by tests, which want to see all
    static Instructions used = best();
    return used;
}

// 32 bfloat16 -> the 16 of even numbers and the 16 of odd ones.
inline __m512 evens(__m512i x) { return (__m512)_mm512_slli_epi32(x, 16); }
inline __m512 odds(__m512i x) { return (__m512)_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000))); }

// 16 outputs' weights of two inputs, and what they are multiplied with: Element says with which instructions.
template <typename Element> struct TwoInputs;

template <>
struct TwoInputs<float> {
    __m512 even, odd;

    explicit TwoInputs(const float* w) : even(_mm512_loadu_ps(w)), odd(_mm512_loadu_ps(w + 16)) {}
    explicit TwoInputs(const bf16* w) : even(evens(_mm512_loadu_si512(w))), odd(odds(_mm512_loadu_si512(w))) {}
    __m512 times(const float* x, __m512 sum) const {
        sum = _mm512_fmadd_ps(_mm512_set1_ps(x[0]), even, sum);
        return _mm512_fmadd_ps(_mm512_set1_ps(x[1]), odd, sum);
    }
};

#if defined(__AVX512BF16__)
inline __m512bh pair_of(const bf16* p) {
    int32_t both;
    std::memcpy(&both, p, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}
inline __m512bh pairs_at(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }
template <>
struct TwoInputs<bf16> {
    __m512bh both;

    explicit TwoInputs(const bf16* w) : both(pairs_at(w)) {}
    __m512 times(const bf16* x, __m512 sum) const { return _mm512_dpbf16_ps(sum, pair_of(x), both); }
};

inline __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
template <>
struct TwoInputs<bf16> {  // never made
    explicit TwoInputs(const bf16*) {}
    __m512 times(const bf16*, __m512 sum) const { return sum; }
};

inline __m256i rounded(__m512 x) {  // to nearest, ties to even; NaN stays NaN
    const __m512i bits = (__m512i)x, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i all = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(all, 16));
}
#endif

inline void put(bf16* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, rounded(x)); }
inline void put(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void put(bf16* to, __m512 low, __m512 high) {  // 32 floats
    put(to, low);
    put(to + 16, high);
}

}  // namespace
