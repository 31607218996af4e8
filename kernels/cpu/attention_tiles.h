// Attention of bfloat16 heads with AMX: attention_bf16.h says what it computes.
//
// Up to four query vectors, as a row that decodes has: keys are the first operand as they lie, and values meet their weights in
// registers, as floats. More, as in a prompt: keys are the first operand, too, so a lane of the scores is a query, and the softmax
// of sixteen queries needs no sum of lanes. A block's values are interleaved once for all of them, and both products are of tiles.
//
// The numbers are added in the same order either way, as a tile instruction does: of 32 keys' values, the even keys' products, the
// odd ones', and the sum of the two to the sum so far.
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

// Four tiles of 16 keys as they lie, and turned queries [2][dim / 2][16][2] -> scores [64][32].
inline void score_many(const bf16* const* keys, int64_t tiles, int64_t dim, const bf16* queries, int64_t vectors, float* scores) {
    const bf16* more = vectors > LANES ? queries + LANES * dim : queries;
    for (int64_t t = 0; t < tiles; t += 2, scores += 2 * LANES * QUERIES) {
        const bool both = t + 1 < tiles;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < dim; d += 32) {
            _tile_loadd(4, keys[t] + d, dim * 2);
            _tile_loadd(6, queries + d * LANES, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, more + d * LANES, 64);
            _tile_dpbf16ps(1, 4, 7);
            if (!both) continue;
            _tile_loadd(5, keys[t + 1] + d, dim * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, scores, QUERIES * 4);
        _tile_stored(1, scores + LANES, QUERIES * 4);
        if (!both) continue;
        _tile_stored(2, scores + LANES * QUERIES, QUERIES * 4);
        _tile_stored(3, scores + LANES * QUERIES + LANES, QUERIES * 4);
    }
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
inline void score_many(const bf16* const*, int64_t, int64_t, const bf16*, int64_t, float*) {}
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

// 16 queries [16][dim] -> [dim / 2][16][2].
inline void turn_queries(const bf16* queries, int64_t dim, bf16* to) {
    for (int64_t d = 0; d < dim; d += 32) {
        IVec rows[16];
        for (int j = 0; j < 16; j++) rows[j] = load_words(queries + j * dim + d);
        transpose16(rows);
        for (int j = 0; j < 16; j++) put_pairs(to + (d / 2 + j) * 32, rows[j]);
    }
}

// A query's place in a block, in each lane, and which of the block's keys it sees: up to its own, of a window's.
struct Places {
    IVec own;
    int32_t window;  // 0: none
    bool all;  // all of them see all keys of the block

    Places(int64_t first, int64_t position, int64_t vector, int64_t group, int64_t window) : window(int32_t(window)) {
        for (int i = 0; i < LANES; i++) own[i] = int32_t(position + (vector + i) / group - first);
        all = own[0] >= BLOCK - 1 && (!window || own[LANES - 1] < window);
    }
    Mask see(int64_t key) const {
        const Mask seen = mask(own >= int32_t(key));
        return window ? Mask(seen & mask(own < int32_t(key) + window)) : seen;
    }
};

// Softmax of sixteen queries, one in each lane, with the bits of Softmax.
struct Softmaxes {
    Vec top = splat(-INFINITY), total = {};

    // Scores [64][32] of the first `tiles` times 16 keys become weights [16][64], of whole pairs of tiles.
    template <bool ALL>
    void take(float* scores, int64_t tiles, const Places& places, float scale, float* mixed, int64_t vectors, int64_t dim,
              bf16* weights) {
        const int64_t count = tiles * LANES, whole = (count + 31) / 32 * 32;
        Vec most[4] = {top, top, top, top};
        for (int64_t key = 0; key < count; key += 4)
            each<4>([&](auto i) ALWAYS_INLINE {
                float* score = scores + (key + i) * QUERIES;
                const Vec x = load(score) * scale;
                store(score, x);
                const Vec more = larger(most[i], x);
                most[i] = ALL ? more : where(places.see(key + i), more, most[i]);
            });
        const Vec best = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        alignas(64) IVec pairs[BLOCK / 2];
        for (int64_t key = 0; key < count; key += 2) {
            Vec two[2];
            each<2>([&](auto i) ALWAYS_INLINE {
                float* score = scores + (key + i) * QUERIES;
                const Vec weight = exp_negative(load(score) - best);
                two[i] = ALL ? weight : where(places.see(key + i), weight, Vec{});
                store(score, two[i]);
            });
            pairs[key / 2] = in_pairs(two[0], two[1]);
        }
        for (int64_t key = count; key < whole; key += 2) pairs[key / 2] = IVec{};
        for (int64_t key = 0; key < whole; key += 32) {
            IVec rows[16];
            for (int i = 0; i < 16; i++) rows[i] = pairs[key / 2 + i];
            transpose16(rows);
            for (int i = 0; i < 16; i++) put_pairs(weights + i * BLOCK + key, rows[i]);
        }
        shrink(best, mixed, vectors, dim);
        Vec sums[LANES];
        each<LANES>([&](auto i) ALWAYS_INLINE { sums[i] = load(scores + i * QUERIES); });
        for (int64_t key = LANES; key < count; key += LANES)
            each<LANES>([&](auto i) ALWAYS_INLINE { sums[i] = sums[i] + load(scores + (key + i) * QUERIES); });
        each<8>([&](auto i) ALWAYS_INLINE { sums[i] = sums[i] + sums[i + 8]; });  // as `sum` adds lanes
        each<4>([&](auto i) ALWAYS_INLINE { sums[i] = sums[i] + sums[i + 4]; });
        total = total + ((sums[0] + sums[2]) + (sums[1] + sums[3]));
    }

   private:
    void shrink(Vec best, float* mixed, int64_t vectors, int64_t dim) {
        const Mask first = mask((IVec)(top == -INFINITY)), changed = mask((IVec)(best != top));
        const Vec by = where(first, Vec{}, exp_negative(top - best));
        total = where(changed, total * by, total);
        alignas(64) float each_by[LANES];
        store(each_by, by);
        for (unsigned left = changed & ~first; left; left &= left - 1) {
            const int64_t i = __builtin_ctz(left);
            if (i >= vectors) break;
            for (int64_t d = 0; d < dim; d += LANES) store(mixed + i * dim + d, load(mixed + i * dim + d) * each_by[i]);
        }
        top = best;
    }
    // Rounded to bfloat16, lane by lane beside one another.
    static IVec in_pairs(Vec first, Vec second) {
#if defined(__AVX512BF16__)
        const __m512i lanes = _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                                                0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
        return (IVec)_mm512_permutexvar_epi16(lanes, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
        return ((IVec)round_to_bf16(first) >> 16 & 0xffff) | (IVec)round_to_bf16(second);
#endif
    }
};

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
    Softmax softmax[BESIDE];
    Softmaxes sixteens[QUERIES / LANES];
    for (int64_t m = 0; sinks && m < vectors; m++) {
        if (few) softmax[m] = {sinks[m % group], 1.0f};
        sixteens[m / LANES].top[m % LANES] = sinks[m % group], sixteens[m / LANES].total[m % LANES] = 1.0f;
    }
    std::fill_n(s.mixed.data(), vectors * dim, 0.0f);
    if (few) {
        begin_few_scores();
        for (int64_t m = 0; m < BESIDE; m++)
            for (int64_t d = 0; d < dim; d += 2)
                std::memcpy(s.pairs.data() + d * BESIDE + m * 2,
                            m < vectors ? s.queries.data() + m * dim + d : s.zeros.data(), 4);
    } else {
        begin_tiles();
        for (int64_t m = 0; m < vectors; m += LANES) turn_queries(s.queries.data() + m * dim, dim, s.turned.data() + m * dim);
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
        const bf16* keys[4];
        for (int64_t t = 0; t < tiles; t++) {
            bf16* own = s.keys.data() + t * LANES * dim;
            keys[t] = pages.page_size % LANES == 0 ? pages.keys + block.at[t * LANES] : own;
            for (int64_t j = t * LANES; j < std::min(block.filled, (t + 1) * LANES) && keys[t] == own; j++)
                std::memcpy(own + j % LANES * dim, pages.keys + block.at[j], dim * sizeof(bf16));
        }
        if (few) {
            alignas(64) float products[BLOCK * BESIDE];
            alignas(64) Rounded weights[BESIDE][BLOCK];
            Vec scores[BESIDE][4];
            score_few(keys, tiles, dim, s.pairs.data(), products);
            for (int64_t t = 0; t < tiles; t++) by_query(products + t * LANES * BESIDE, scores, t);
            for (int64_t i = 0; i < vectors; i++)
                softmax[i].take(scores[i], Seen(first, position + i / group, window).tile, tiles, scale,
                                s.mixed.data() + i * dim, dim, weights[i]);
            mixing[vectors - 1]((const float(*)[BLOCK])weights, count, values, dim, s.mixed.data(),
                                cache.int8 ? nullptr : &next, pages.values);
        } else {
            alignas(64) float scores[BLOCK][QUERIES];
            alignas(64) bf16 weights[QUERIES][BLOCK];
            const int64_t mixes = tiles > 2 ? BLOCK : 32;
            score_many(keys, tiles, dim, s.turned.data(), vectors, scores[0]);
            interleave(values, mixes, dim, s.values.data());
            for (int64_t m = 0; m < vectors; m += LANES) {
                const Places places(first, position, m, group, window);
                const auto take = places.all ? &Softmaxes::take<true> : &Softmaxes::take<false>;
                (sixteens[m / LANES].*take)(scores[0] + m, tiles, places, scale, s.mixed.data() + m * dim, vectors - m, dim,
                                            weights[m]);
            }
            for (int64_t m = 0; m < vectors; m += LANES)
                mix_many(weights[m], mixes, s.values.data(), dim, s.mixed.data() + m * dim);
        }
        block = next;
    }
    end_tiles();
    for (int64_t m = 0; m < vectors; m++)
        for (int64_t d = 0; d < dim; d += 32)
            if (few)
                in_order<float>(s.mixed.data() + m * dim + d, softmax[m].total);
            else
                in_order<bf16>(s.mixed.data() + m * dim + d, sixteens[m / LANES].total[m % LANES]);
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
