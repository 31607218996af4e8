// t = x A^T for many rows of one adapter, in float32, to the bit what few rows have: an instruction of pairs is two fused
// multiply-adds, of the odd inputs and then of the even ones, for which Intel's cores take twice as long as for these.
#pragma once
#include "lowrank.h"

namespace {

constexpr int SIDE = 4;  // rows, and ranks, that registers have sums for

// `in` bfloat16, 32 of them every `step` elements, as floats: of each 32 the odd ones, then the even ones.
inline void widen_apart(const bf16* from, int64_t step, int64_t in, float* to) {
    for (int64_t d = 0; d < in; d += 32, from += step, to += 32) {
        const __m512i both = _mm512_loadu_si512(from);
        _mm512_store_ps(to, odds(both));
        _mm512_store_ps(to + 16, evens(both));
    }
}

// The sums of 16 vectors, each added up in the order of _mm512_reduce_add_ps.
inline __m512 reduce_add(const __m512 (&v)[16]) {
    __m512 halves[8], quarters[4], pairs[2];
    for (int i = 0; i < 8; i++) {
        const __m512 a = v[i / 4 * 8 + i % 4], b = v[i / 4 * 8 + i % 4 + 4];
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
    return _mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd));
}

// Four rows of x times four of A, all `in` floats apart; a sum is four, of every fourth 32 inputs.
inline __m512 dots_of_four(const float* x, const float* a, int64_t in) {
    __m512 part[4][SIDE * SIDE];
    for (int64_t p = 0; p < 4; p++) {
        __m512 sum[SIDE * SIDE] = {};
        for (int64_t d = p * 32; d < in; d += 128)
            for (int64_t half = 0; half < 32; half += 16) {
                __m512 left[SIDE];
                for (int i = 0; i < SIDE; i++) left[i] = _mm512_load_ps(x + i * in + d + half);
                for (int r = 0; r < SIDE; r++) {
                    const __m512 right = _mm512_load_ps(a + r * in + d + half);
                    for (int i = 0; i < SIDE; i++) sum[i * SIDE + r] = _mm512_fmadd_ps(left[i], right, sum[i * SIDE + r]);
                }
            }
        for (int i = 0; i < SIDE * SIDE; i++) part[p][i] = sum[i];
    }
    __m512 whole[SIDE * SIDE];
    for (int i = 0; i < SIDE * SIDE; i++)
        whole[i] = _mm512_add_ps(_mm512_add_ps(part[0][i], part[1][i]), _mm512_add_ps(part[2][i], part[3][i]));
    return reduce_add(whole);
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
                _mm512_store_ps(dots, dots_of_four(xs + i * in, as + r * in, in));
                for (int of = 0; of < SIDE; of++)
                    std::memcpy(sums + (i + of) * RANKS + r, dots[of], sizeof dots[of]);
            }
        put_ranks(sums, item.rows, t, page.to + item.skipped * 32);
    }
}

}  // namespace
