// Attention of bfloat16 heads with AMX: attention_bf16.h says what it computes.
//
// Up to four query vectors, as a row that decodes has: keys are the first operand as they lie, and values meet their weights in
// registers, as floats. More, as in a prompt: a block's keys are transposed and its values interleaved once for all of them,
// and both products are of tiles. The numbers are added in the same order either way, as a tile instruction does: of 32 keys'
// values, the even keys' products, the odd ones', and the sum of the two to the sum so far.
#pragma once
#include "attention_bf16.h"

namespace {

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
inline void begin_few_scores() {  // 0 to 3: scores [16 keys][4 queries]; 4: queries [16 pairs][4][2]; 5 to 7: keys
    Tiles tiles;
    for (int tile = 0; tile < 8; tile++) tiles.shape(tile, 16, tile < 5 ? 16 : 64);
    tiles.load();
}

// keys: four tiles of 16 rows, `stride` elements apart -> scores [64][4].
inline void score_few(const bf16* const* keys, int64_t tiles, int64_t stride, const bf16* pairs, float* scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < stride; d += 32, pairs += 32 * BESIDE) {
        _tile_loadd(4, pairs, 16);
        _tile_loadd(5, keys[0] + d, stride * 2);
        _tile_dpbf16ps(0, 5, 4);
        if (tiles < 2) continue;
        _tile_loadd(6, keys[1] + d, stride * 2);
        _tile_dpbf16ps(1, 6, 4);
        if (tiles < 3) continue;
        _tile_loadd(7, keys[2] + d, stride * 2);
        _tile_dpbf16ps(2, 7, 4);
        if (tiles < 4) continue;
        _tile_loadd(5, keys[3] + d, stride * 2);
        _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, scores, 16);
    _tile_stored(1, scores + 64, 16);
    _tile_stored(2, scores + 128, 16);
    _tile_stored(3, scores + 192, 16);
}

// 16 queries [16][dim] and transposed keys [4][dim / 2][16][2] -> scores [16][64].
inline void score_many(const bf16* queries, const bf16* keys, int64_t dim, float* scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < dim; d += 32, keys += TILE) {
        _tile_loadd(4, queries + d, dim * 2);
        _tile_loadd(5, keys, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, keys + LANES * dim, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(5, keys + 2 * LANES * dim, 64);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(6, keys + 3 * LANES * dim, 64);
        _tile_dpbf16ps(3, 4, 6);
    }
    _tile_stored(0, scores, BLOCK * 4);
    _tile_stored(1, scores + 16, BLOCK * 4);
    _tile_stored(2, scores + 32, BLOCK * 4);
    _tile_stored(3, scores + 48, BLOCK * 4);
}

// mixed [16][dim] += weights [16][64] of 32 or 64 keys times their values, interleaved: [2][dim / 16][16][2].
inline void mix_many(const bf16* weights, int64_t count, const bf16* values, int64_t dim, float* mixed) {
    for (int64_t d = 0; d < dim; d += 32, values += 2 * TILE) {
        _tile_loadd(0, mixed + d, dim * 4);
        _tile_loadd(1, mixed + d + 16, dim * 4);
        for (int64_t key = 0; key < count; key += 32) {
            _tile_loadd(4, weights + key, BLOCK * 2);
            _tile_loadd(5, values + key * dim, 64);
            _tile_loadd(6, values + key * dim + TILE, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 6);
        }
        _tile_stored(0, mixed + d, dim * 4);
        _tile_stored(1, mixed + d + 16, dim * 4);
    }
}
#else
inline void begin_few_scores() {}
inline void score_few(const bf16* const*, int64_t, int64_t, const bf16*, float*) {}
inline void score_many(const bf16*, const bf16*, int64_t, float*) {}
inline void mix_many(const bf16*, int64_t, const bf16*, int64_t, float*) {}
#endif

#if defined(WIDE_REGISTERS)
// Scores [16 keys][4 queries] -> a vector of 16 keys for each query.
inline void by_query(const float* from, Vec (*to)[4], int64_t tile) {
    const __m512i even = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(2));
    const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16), c = _mm512_loadu_ps(from + 32),
                 d = _mm512_loadu_ps(from + 48);
    const __m512 ab = _mm512_permutex2var_ps(a, even, b), cd = _mm512_permutex2var_ps(c, even, d);
    const __m512 ab2 = _mm512_permutex2var_ps(a, odd, b), cd2 = _mm512_permutex2var_ps(c, odd, d);
    to[0][tile] = (Vec)_mm512_shuffle_f32x4(ab, cd, 0x44);
    to[1][tile] = (Vec)_mm512_shuffle_f32x4(ab, cd, 0xee);
    to[2][tile] = (Vec)_mm512_shuffle_f32x4(ab2, cd2, 0x44);
    to[3][tile] = (Vec)_mm512_shuffle_f32x4(ab2, cd2, 0xee);
}

// As `mix`, in the order of a tile instruction: mixed's dimensions are in the order of TwoValues<float>.
template <int N>
void mix_few(const float (*weights)[BLOCK], int64_t count, const bf16* const* values, int64_t dim, float* mixed,
             const Block* next, const bf16* from) {
    for (int64_t d = 0; d < dim; d += 32)
        for (int64_t first = 0; first < count; first += 32) {
            Vec sum[2][N][2] = {};  // of even keys and of odd ones
            for (int64_t key = first; key < std::min(count, first + 32); key += 2) {
                if (next && !d && key % LANES == 0) next->prefetch(from, key / LANES, dim);
                for (int odd = 0; odd < 2; odd++) {
                    const IVec value = load_words(values[key + odd] + d);
                    const Vec parts[2] = {evens(value), odds(value)};
                    for (int i = 0; i < N; i++)
                        for (int half = 0; half < 2; half++)
                            sum[odd][i][half] =
                                fma(splat(weights[i][key + odd]), parts[half], sum[odd][i][half]);
                }
            }
            for (int i = 0; i < N; i++)
                for (int half = 0; half < 2; half++) {
                    float* to = mixed + i * dim + d + half * 16;
                    store(to, load(to) + (sum[0][i][half] + sum[1][i][half]));
                }
        }
}

// 64 keys' values -> [2][dim / 16][16 pairs][16][2], in each 32 dimensions in the order of TwoValues<bf16>.
inline void interleave(const bf16* const* values, int64_t count, int64_t dim, bf16* to) {
    for (int64_t key = 0; key < count; key += 2)
        for (int64_t d = 0; d < dim; d += 32) {
            const __m512i a = _mm512_loadu_si512(values[key] + d), b = _mm512_loadu_si512(values[key + 1] + d);
            bf16* pair = to + key / 32 * 32 * dim + d / 16 * TILE + key % 32 * 16;
            _mm512_storeu_si512(pair, _mm512_unpacklo_epi16(a, b));
            _mm512_storeu_si512(pair + TILE, _mm512_unpackhi_epi16(a, b));
        }
}

struct Rounded {  // a weight that a tile has as bfloat16, as the float that this is
    float value;
};
inline void put(Rounded* to, Vec x) { store((float*)to, round_to_bf16(x)); }

// As attend_as.
inline void attend_with_tiles(const Pages& cache, int64_t head, int64_t group, int64_t vectors, int64_t position,
                              int64_t length, float scale, int64_t window, const float* sinks, const Block& after,
                              AttentionScratch& s) {
    static constexpr decltype(&mix_few<1>) mixing[] = {mix_few<1>, mix_few<2>, mix_few<3>, mix_few<4>};
    const int64_t dim = s.dim, end = position + (vectors + group - 1) / group;
    const bool few = vectors <= BESIDE;
    Softmax softmax[QUERIES];
    for (int64_t m = 0; sinks && m < vectors; m++) softmax[m] = {sinks[m % group], 1.0f};
    std::fill_n(s.mixed.data(), vectors * dim, 0.0f);
    if (few) {
        begin_few_scores();
        for (int64_t m = 0; m < BESIDE; m++)
            for (int64_t d = 0; d < dim; d += 2)
                std::memcpy(s.pairs.data() + d * BESIDE + m * 2,
                            m < vectors ? s.queries.data() + m * dim + d : s.zeros.data(), 4);
    } else {
        begin_tiles();
    }
    int64_t first = window ? std::max<int64_t>(0, position - window + 1) / BLOCK * BLOCK : 0;
    Block block(cache, head, first, length);
    for (; first < end; first += BLOCK) {
        const Block next = first + BLOCK >= end ? after : Block(cache, head, first + BLOCK, length);
        const Pages pages = cache.int8 ? widened(cache, block, next, s) : cache;
        const int64_t count = std::min(block.filled, end - first), tiles = (count + LANES - 1) / LANES;
        const bf16* values[BLOCK];
        for (int64_t j = 0; j < BLOCK; j++) values[j] = j < block.filled ? pages.values + block.at[j] : s.zeros.data();
        for (int64_t t = 0; t < tiles && !cache.int8; t++) next.prefetch(pages.keys, t, dim);
        if (few) {
            const bf16* keys[4];
            alignas(64) float products[BLOCK * BESIDE];
            alignas(64) Rounded weights[BESIDE][BLOCK];
            Vec scores[BESIDE][4];
            for (int64_t t = 0; t < tiles; t++) {
                bf16* own = s.keys.data() + t * LANES * dim;
                keys[t] = pages.page_size % LANES == 0 ? pages.keys + block.at[t * LANES] : own;
                for (int64_t j = t * LANES; j < std::min(block.filled, (t + 1) * LANES) && keys[t] == own; j++)
                    std::memcpy(own + j % LANES * dim, pages.keys + block.at[j], dim * sizeof(bf16));
            }
            score_few(keys, tiles, dim, s.pairs.data(), products);
            for (int64_t t = 0; t < tiles; t++) by_query(products + t * LANES * BESIDE, scores, t);
            for (int64_t i = 0; i < vectors; i++)
                softmax[i].take(scores[i], Seen(first, position + i / group, window).tile, tiles, scale,
                                s.mixed.data() + i * dim, dim, weights[i]);
            mixing[vectors - 1]((const float(*)[BLOCK])weights, count, values, dim, s.mixed.data(),
                                cache.int8 ? nullptr : &next, pages.values);
        } else {
            alignas(64) float scores[QUERIES][BLOCK];
            alignas(64) bf16 weights[QUERIES][BLOCK];
            for (int64_t t = 0; t < 4; t++) transpose_keys(pages, block, t, s.keys.data() + t * LANES * dim);
            interleave(values, BLOCK, dim, s.values.data());
            for (int64_t m = 0; m < vectors; m += LANES)
                score_many(s.queries.data() + m * dim, s.keys.data(), dim, scores[m]);
            for (int64_t i = 0; i < vectors; i++) {
                const Vec of_query[4] = {load(scores[i]), load(scores[i] + 16), load(scores[i] + 32), load(scores[i] + 48)};
                softmax[i].take(of_query, Seen(first, position + i / group, window).tile, 4, scale,
                                s.mixed.data() + i * dim, dim, weights[i]);
            }
            for (int64_t m = 0; m < vectors; m += LANES)
                mix_many(weights[m], tiles > 2 ? BLOCK : 32, s.values.data(), dim, s.mixed.data() + m * dim);
        }
        block = next;
    }
    end_tiles();
    for (int64_t m = 0; m < vectors; m++)
        for (int64_t d = 0; d < dim; d += 32)
            (few ? in_order<float> : in_order<bf16>)(s.mixed.data() + m * dim + d, softmax[m].total);
}
#endif

// With the instructions in use.
inline void attend_bf16(const Pages& pages, int64_t head, int64_t group, int64_t vectors, int64_t position,
                        int64_t length, float scale, int64_t window, const float* sinks, const Block& after,
                        AttentionScratch& s) {
#if defined(WIDE_REGISTERS)
    const Instructions kind = instructions();
    const auto attend = kind == TILES ? attend_with_tiles : kind == PAIRS ? attend_as<bf16> : attend_as<float>;
#else
    const auto attend = attend_as<float>;
#endif
    attend(pages, head, group, vectors, position, length, scale, window, sinks, after, s);
}

}  // namespace
