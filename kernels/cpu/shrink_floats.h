// t = x A^T for many rows of one adapter, in float32, to the bit what few rows have: an instruction of pairs is two fused
// multiply-adds, of the odd inputs and then of the even ones, for which Intel's cores take twice as long as for these.
#pragma once
#include "lowrank.h"

namespace {

constexpr int SIDE = 4;  // rows, and ranks, that registers have sums for

// `in` bfloat16, 32 of them every `step` elements, as floats: of each 32 the odd ones, then the even ones.
inline void widen_apart(const bf16* from, int64_t step, int64_t in, float* to) {
    for (int64_t d = 0; d < in; d += 32, from += step, to += 32) {
        const IVec both = load_words(from);
        store(to, odds(both));
        store(to + 16, evens(both));
    }
}

// The sums of 16 vectors, each added up in the order of `sum`.
inline Vec sums_of(const Vec (&v)[16]) {
#if defined(WIDE_REGISTERS)
    __m512 halves[8], quarters[4], pairs[2];
    for (int i = 0; i < 8; i++) {
        const __m512 a = (__m512)v[i / 4 * 8 + i % 4], b = (__m512)v[i / 4 * 8 + i % 4 + 4];
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    for (int i = 0; i < 4; i++) {
        const __m512 a = halves[i], b = halves[i + 4];
        quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; i++) {
        const __m512 a = quarters[2 * i], b = quarters[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    }
    return (Vec)_mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
#else
    float sums[16];
    for (int i = 0; i < 16; i++) sums[i] = sum(v[i]);
    return load(sums);
#endif
}

// Four rows of x times four of A, all `in` floats apart; a sum is four, of every fourth 32 inputs.
inline Vec dots_of_four(const float* x, const float* a, int64_t in) {
    constexpr int AT_ONCE = TOGETHER > 1 ? SIDE : 1;  // rows whose sums fit into the registers
    Vec part[4][SIDE * SIDE];
    for (int64_t p = 0; p < 4; p++)
        for (int from = 0; from < SIDE; from += AT_ONCE) {
            Vec sum[AT_ONCE][SIDE] = {};
            for (int64_t d = p * 32; d < in; d += 128)
                for (int64_t half = 0; half < 32; half += 16) {
                    Vec left[AT_ONCE];
                    each<AT_ONCE>([&](auto i) ALWAYS_INLINE { left[i] = load(x + (from + i) * in + d + half); });
                    each<SIDE>([&](auto r) ALWAYS_INLINE {
                        const Vec right = load(a + r * in + d + half);
                        each<AT_ONCE>([&](auto i) ALWAYS_INLINE { sum[i][r] = fma(left[i], right, sum[i][r]); });
                    });
                }
            each<AT_ONCE>([&](auto i) ALWAYS_INLINE {
                each<SIDE>([&](auto r) ALWAYS_INLINE { part[p][(from + i) * SIDE + r] = sum[i][r]; });
            });
        }
    Vec whole[SIDE * SIDE];
    for (int i = 0; i < SIDE * SIDE; i++) whole[i] = (part[0][i] + part[1][i]) + (part[2][i] + part[3][i]);
    return sums_of(whole);
}

inline void shrink_floats(const LoraPlan& plan, Input input, const Shrink& item, int64_t layer, int64_t in, const Rows& x,
                          const Shrunk& t, LoraScratch& scratch) {
    const int64_t rows = (item.rows + SIDE - 1) / SIDE * SIDE;
    float *xs = scratch.floats((rows + RANKS) * in), *as = xs + rows * in;
    for (int64_t i = 0; i < rows; i++) widen_apart(x.at(item.row + std::min(i, item.rows - 1), 0), TILE, in, xs + i * in);
    for (int64_t p = item.first; p < item.first + item.pages; p++) {
        const RankPage& page = plan.pages[input][p];
        for (int64_t r = 0; r < RANKS; r++) widen_apart(page.a + layer * page.layer + r * in, 32, in, as + r * in);
        alignas(64) float sums[BAND * RANKS];
        for (int64_t i = 0; i < rows; i += SIDE)
            for (int64_t r = 0; r < RANKS; r += SIDE) {
                alignas(64) float dots[SIDE][SIDE];
                store(dots[0], dots_of_four(xs + i * in, as + r * in, in));
                for (int of = 0; of < SIDE; of++)
                    std::memcpy(sums + (i + of) * RANKS + r, dots[of], sizeof dots[of]);
            }
        put_ranks(sums, item.rows, t, page.to + item.skipped * 32);
    }
}

}  // namespace
