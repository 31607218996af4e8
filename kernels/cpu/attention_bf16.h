// Attention of bfloat16 heads over the paged cache, with AVX-512's products of pairs.
//
// As attention.h: online softmax over tiles of 16 keys, counted from the sequence's first, so that a query's bits
// depend on nothing but its own sequence. Queries and weights are rounded to bfloat16, as the tensors that hold
// them elsewhere are; sums are float32.
#pragma once
#include <cmath>

#include "packed.h"

namespace {

constexpr int64_t QUERIES = 32;  // query vectors that share the tiles of a key/value head

struct Pages {  // one layer's cache and one sequence's pages in it
    const bf16 *keys, *values;
    const int32_t* table;
    int64_t page_size, page_stride, dim;

    int64_t at(int64_t position, int64_t head) const {
        return table[position / page_size] * page_stride + (head * page_size + position % page_size) * dim;
    }
};

struct AttentionScratch {
    explicit AttentionScratch(int64_t dim)
        : dim(dim), queries(QUERIES * dim), keys(LANES * dim), values(LANES * dim), mixed(QUERIES * dim) {}
    int64_t dim;
    std::vector<bf16> queries, keys, values;
    std::vector<float> mixed;
};

// 16 rows of 16 pairs -> 16 pairs of 16 rows.
inline void transpose16(__m512i (&v)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
        }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(v[i], v[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(v[8 + i], v[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        v[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        v[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        v[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

// Keys [16][dim] -> [dim / 2][16][2]; values [16][dim] -> [8 pairs of keys][dim][2]. What is past the end becomes
// zero: there lies what earlier owners left, NaN perhaps.
inline void read_tile(const Pages& pages, int64_t head, int64_t tile, int64_t filled, AttentionScratch& s) {
    const bf16 *k[16], *v[16];
    for (int64_t j = 0; j < LANES; j++) {
        const int64_t at = j < filled ? pages.at(tile + j, head) : 0;
        k[j] = j < filled ? pages.keys + at : nullptr;
        v[j] = j < filled ? pages.values + at : nullptr;
    }
    for (int64_t d = 0; d < s.dim; d += 32) {
        __m512i rows[16];
        for (int j = 0; j < 16; j++) rows[j] = k[j] ? _mm512_loadu_si512(k[j] + d) : _mm512_setzero_si512();
        transpose16(rows);
        for (int j = 0; j < 16; j++) _mm512_storeu_si512(s.keys.data() + (d / 2 + j) * 32, rows[j]);
    }
    for (int64_t j = 0; j < LANES; j += 2)
        for (int64_t d = 0; d < s.dim; d += 16) {
            const __m256i none = _mm256_setzero_si256();
            const __m256i first = v[j] ? _mm256_loadu_si256((const __m256i*)(v[j] + d)) : none;
            const __m256i second = v[j + 1] ? _mm256_loadu_si256((const __m256i*)(v[j + 1] + d)) : none;
            const __m512i both = _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                                                 _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
            _mm512_storeu_si512(s.values.data() + (j / 2 * s.dim + d) * 2, both);
        }
}

// The next tile lies in another page; the processor's own prefetching does not find it.
inline void prefetch_tile(const Pages& pages, int64_t head, int64_t tile, int64_t filled) {
    for (int64_t j = 0; j < filled; j++) {
        const int64_t at = pages.at(tile + j, head);
        for (int64_t d = 0; d < pages.dim; d += 32) {
            _mm_prefetch((const char*)(pages.keys + at + d), _MM_HINT_T0);
            _mm_prefetch((const char*)(pages.values + at + d), _MM_HINT_T0);
        }
    }
}

// mixed[0..N) += weights of 16 keys times their values.
template <int N>
void mix(const bf16 (*weights)[16], const AttentionScratch& s, float* mixed) {
    for (int64_t d = 0; d < s.dim; d += 16) {
        __m512 sum[N];
        for (int i = 0; i < N; i++) sum[i] = _mm512_loadu_ps(mixed + i * s.dim + d);
        for (int pair = 0; pair < 8; pair++) {
            const __m512bh values = pairs_at(s.values.data() + (pair * s.dim + d) * 2);
            for (int i = 0; i < N; i++) sum[i] = _mm512_dpbf16_ps(sum[i], values, pair_of(weights[i] + 2 * pair));
        }
        for (int i = 0; i < N; i++) _mm512_storeu_ps(mixed + i * s.dim + d, sum[i]);
    }
}

template <int N>
void score(const bf16* queries, const AttentionScratch& s, __m512 (&scores)[4]) {
    for (int i = 0; i < N; i++) scores[i] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < s.dim / 2; pair++) {
        const __m512bh keys = pairs_at(s.keys.data() + pair * 32);
        for (int i = 0; i < N; i++)
            scores[i] = _mm512_dpbf16_ps(scores[i], keys, pair_of(queries + i * s.dim + 2 * pair));
    }
}

// Query vectors 0 to `vectors` of one key/value head, in s.queries: tokens in order, `group` heads of each; the
// first token lies at `position`. Leaves their mixes in s.mixed.
inline void attend_bf16(const Pages& pages, int64_t head, int64_t group, int64_t vectors, int64_t position,
                        int64_t length, float scale, int64_t window, AttentionScratch& s) {
    static void (*const scoring[])(const bf16*, const AttentionScratch&, __m512 (&)[4]) = {score<1>, score<2>,
                                                                                           score<3>, score<4>};
    static void (*const mixing[])(const bf16 (*)[16], const AttentionScratch&, float*) = {mix<1>, mix<2>, mix<3>,
                                                                                         mix<4>};
    float top[QUERIES], total[QUERIES];
    std::fill_n(top, QUERIES, -INFINITY);
    std::fill_n(total, QUERIES, 0.0f);
    std::fill_n(s.mixed.data(), vectors * s.dim, 0.0f);
    const int64_t end = position + (vectors + group - 1) / group;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t tile = window ? std::max<int64_t>(0, position - window + 1) / LANES * LANES : 0;
    for (; tile < end; tile += LANES) {
        read_tile(pages, head, tile, std::min<int64_t>(LANES, length - tile), s);
        if (tile + LANES < end)
            prefetch_tile(pages, head, tile + LANES, std::min<int64_t>(LANES, length - tile - LANES));
        const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32(int32_t(tile)));
        for (int64_t m = 0; m < vectors; m += 4) {
            const int64_t n = std::min<int64_t>(4, vectors - m);
            __m512 scores[4];
            bf16 weights[4][16];
            scoring[n - 1](s.queries.data() + m * s.dim, s, scores);
            for (int64_t i = 0; i < n; i++) {
                const int32_t query = int32_t(position + (m + i) / group);
                __mmask16 seen = _mm512_cmple_epi32_mask(at, _mm512_set1_epi32(query));
                if (window) seen &= _mm512_cmpgt_epi32_mask(at, _mm512_set1_epi32(int32_t(query - window)));
                const __m512 score = _mm512_mul_ps(scores[i], _mm512_set1_ps(scale));
                const float best =
                    seen ? std::max(top[m + i], _mm512_mask_reduce_max_ps(seen, score)) : top[m + i];
                Vec weight = {};
                if (seen) {
                    weight = (Vec)_mm512_maskz_mov_ps(seen, (__m512)exp_negative((Vec)score - best));
                    if (best != top[m + i]) {
                        const float shrink = top[m + i] == -INFINITY ? 0.0f : exp_scalar(top[m + i] - best);
                        total[m + i] *= shrink;
                        float* mixed = s.mixed.data() + (m + i) * s.dim;
                        for (int64_t d = 0; d < s.dim; d += 16) store(mixed + d, load(mixed + d) * shrink);
                        top[m + i] = best;
                    }
                    total[m + i] += sum(weight);
                }
                put(weights[i], (__m512)weight);
            }
            mixing[n - 1](weights, s, s.mixed.data() + m * s.dim);
        }
    }
    for (int64_t m = 0; m < vectors; m++)
        for (int64_t d = 0; d < s.dim; d += 16)
            store(s.mixed.data() + m * s.dim + d, load(s.mixed.data() + m * s.dim + d) / total[m]);
}

}  // namespace
