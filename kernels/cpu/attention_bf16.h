// Attention of bfloat16 heads over the paged cache, with products of bfloat16 pairs or, widened, of floats; with AMX see
// attention_tiles.h.
//
// As attention.h: online softmax over blocks of keys, here 64, counted from the sequence's first, so that a query's
// bits depend on nothing but its own sequence. Queries and (but where floats are multiplied) weights are rounded to
// bfloat16, as the tensors that hold them elsewhere are; sums are float32.
//
// A row that decodes asks much memory for little arithmetic: values meet their weights in registers, where they lie.
// A cache in int8 (int8_rows.h) is widened to bfloat16, a block at a time, for all query vectors that share it.
#pragma once
#include <cmath>
#include <vector>

#include "int8_rows.h"
#include "product.h"

namespace {

constexpr int64_t QUERIES = 32;  // query vectors that share the reading of a key/value head
constexpr int64_t BLOCK = 64;    // keys
constexpr int64_t BESIDE = 4;    // query vectors that are computed side by side

// One layer's cache and one sequence's pages in it. `row`: from a token to the next, in elements, which are bytes if
// the cache is in int8.
struct Pages {
    const bf16 *keys, *values;
    const int32_t* table;
    int64_t page_size, page_stride, dim, row;
    bool int8;
};

// Where the keys and values of up to 64 positions of one head lie, from `first` on.
struct Block {
    int64_t at[BLOCK], filled;

    Block() : filled(0) {}
    Block(const Pages& p, int64_t head, int64_t first, int64_t length)
        : filled(std::min<int64_t>(BLOCK, length - first)) {
        int64_t page = first / p.page_size, offset = first % p.page_size;
        for (int64_t done = 0; done < filled; page++, offset = 0) {
            const int64_t count = std::min(p.page_size - offset, filled - done);
            const int64_t from = p.table[page] * p.page_stride + (head * p.page_size + offset) * p.row;
            for (int64_t j = 0; j < count; j++) at[done + j] = from + j * p.row;
            done += count;
        }
    }

    // Asks for 32 dimensions of a row.
    void ask(const bf16* from, int64_t row, int64_t d) const {
        if (row < filled) __builtin_prefetch(from + at[row] + d);
    }
    // Asks for the first rows of a tile. With them the processor fetches the rest by itself; asking for all would fill
    // the few places for lines that are on their way, which the tile in hand needs too.
    void prefetch(const bf16* from, int64_t tile, int64_t dim) const {
        for (int64_t j = tile * LANES; j < std::min(filled, tile * LANES + 4); j++)
            for (int64_t d = 0; d < dim; d += 32) __builtin_prefetch(from + at[j] + d);
    }
};

struct AttentionScratch {
    explicit AttentionScratch(int64_t dim)
        : dim(dim), queries(QUERIES * dim), pairs(BESIDE * dim), turned(QUERIES * dim), keys(BLOCK * dim), zeros(dim),
          values(BLOCK * dim), wide_queries(QUERIES * dim), wide_keys(BLOCK * dim), mixed(QUERIES * dim) {}
    int64_t dim;
    std::vector<bf16> queries;  // [vectors][dim]
    std::vector<bf16> pairs;    // of few, for AMX: [dim / 2][4][2]
    std::vector<bf16> turned;   // of many, for AMX: [2][dim / 2][16][2]
    std::vector<bf16> keys;     // of a block: [4][dim / 2][16][2]; for AMX [64][dim], where pages are short
    std::vector<bf16> zeros;
    std::vector<bf16> values;   // of a block, for AMX and many vectors: [2][dim / 16][16][16][2]
    std::vector<float> wide_queries, wide_keys;  // as floats: [vectors][dim]; [4][dim][16]
    std::vector<float> mixed;
    std::vector<bf16> widened[2];  // keys and values of a block of a cache in int8: [64][dim]

    bf16* queries_as(bf16, int64_t) { return queries.data(); }
    float* queries_as(float, int64_t vectors) {
        for (int64_t d = 0; d < vectors * dim; d += LANES) store(wide_queries.data() + d, load(queries.data() + d));
        return wide_queries.data();
    }
    bf16* keys_as(bf16) { return keys.data(); }
    float* keys_as(float) { return wide_keys.data(); }
};

inline void widen_row(const char* row, int64_t dim, bf16* to) {
    const Vec scale = splat(scale_of(row, dim));
    for (int64_t d = 0; d < dim; d += LANES) put(to + d, floats(signed_bytes(row + d)) * scale);
}

// A block of a cache in int8 in bfloat16: it then lies in `s`. Asks for what comes next.
inline Pages widened(const Pages& p, Block& block, const Block& next, AttentionScratch& s) {
    const char* from[2] = {(const char*)p.keys, (const char*)p.values};
    for (int side = 0; side < 2; side++) {
        s.widened[side].resize(BLOCK * p.dim);
        for (int64_t j = 0; j < block.filled; j++) {
            if (j < next.filled) __builtin_prefetch(from[side] + next.at[j]);
            widen_row(from[side] + block.at[j], p.dim, s.widened[side].data() + j * p.dim);
        }
    }
    for (int64_t j = 0; j < BLOCK; j++) block.at[j] = j * p.dim;
    return {s.widened[0].data(), s.widened[1].data(), p.table, BLOCK, 0, p.dim, p.dim, false};
}

#if !defined(WIDE_REGISTERS) && defined(__AVX2__)
// Part `side` of rows `first` to `first + 8`, as a matrix of 8 x 8, transposed in its place.
inline void transpose8(IVec (&rows)[16], int first, int side) {
    __m256i v[8], t[8];
    for (int i = 0; i < 8; i++) v[i] = (__m256i)rows[first + i].part[side];
    for (int i = 0; i < 8; i += 2) t[i] = _mm256_unpacklo_epi32(v[i], v[i + 1]), t[i + 1] = _mm256_unpackhi_epi32(v[i], v[i + 1]);
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            v[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + 2 + j]);
            v[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + 2 + j]);
        }
    for (int i = 0; i < 4; i++) {
        rows[first + i].part[side] = (IPart)_mm256_permute2x128_si256(v[i], v[4 + i], 0x20);
        rows[first + 4 + i].part[side] = (IPart)_mm256_permute2x128_si256(v[i], v[4 + i], 0x31);
    }
}
#endif

// 16 rows of 16 pairs -> 16 pairs of 16 rows.
inline void transpose16(IVec (&rows)[16]) {
#if defined(WIDE_REGISTERS)
    __m512i v[16];
    for (int i = 0; i < 16; i++) v[i] = (__m512i)rows[i];
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
    for (int i = 0; i < 16; i++) rows[i] = (IVec)v[i];
#elif defined(__AVX2__)
    for (int side = 0; side < 2; side++)  // of the pairs; the rows' lower half and upper half are apart
        for (int half = 0; half < 2; half++) transpose8(rows, half * 8, side);
    for (int i = 0; i < 8; i++) std::swap(rows[i].part[1], rows[8 + i].part[0]);
#elif defined(SVE)
    IVec turned[16];
    auto turn = [](const IVec(&from)[16], IVec(&to)[16]) ALWAYS_INLINE {
        each<8>([&](auto i) ALWAYS_INLINE {
            IVec two[2];
            weave<1>(from[i], from[i + 8], two);
            to[2 * i] = two[0], to[2 * i + 1] = two[1];
        });
    };
    for (int twice = 0; twice < 2; twice++) turn(rows, turned), turn(turned, rows);
#else
    int32_t from[16][16], to[16][16];
    for (int i = 0; i < 16; i++) std::memcpy(from[i], &rows[i], 64);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j][i] = from[i][j];
    for (int i = 0; i < 16; i++) rows[i] = load_words(to[i]);
#endif
}

inline void put_pairs(bf16* to, IVec pairs) { std::memcpy(to, &pairs, sizeof pairs); }
inline void put_pairs(float* to, IVec pairs) {
    store(to, evens(pairs));
    store(to + 16, odds(pairs));
}

// 16 keys -> [dim / 2][16][2], as floats [dim][16]. What is past the end becomes zero: there lies what earlier owners
// left, NaN perhaps.
template <typename Element>
void transpose_keys(const Pages& p, const Block& block, int64_t tile, Element* to) {
    for (int64_t d = 0; d < p.dim; d += 32) {
        IVec rows[16];
        for (int j = 0; j < 16; j++) {
            const int64_t key = tile * LANES + j;
            rows[j] = key < block.filled ? load_words(p.keys + block.at[key] + d) : IVec{};
        }
        transpose16(rows);
        for (int j = 0; j < 16; j++) put_pairs(to + (d / 2 + j) * 32, rows[j]);
    }
}

// Scores of N queries [N][dim] and a block's 64 transposed keys. (All four tiles, whatever is in the last: sums that do not
// wait for each other.) Meanwhile the keys of `next` (null: none) are asked for, evenly: a sixth of attention's time.
template <int N, typename Element>
void score(const Element* queries, const Element* keys, int64_t dim, Vec (*to)[4], const Block* next, const bf16* from) {
    constexpr int AT_ONCE = TOGETHER > 1 ? 4 : 1;  // tiles whose sums fit into the registers
    for (int first = 0; first < 4; first += AT_ONCE) {
        Vec sum[N][AT_ONCE] = {};
        for (int64_t pair = 0; pair < dim / 2; pair++)
            each<AT_ONCE>([&](auto t) ALWAYS_INLINE {
                const int64_t tile = first + t;
                const TwoInputs<Element> two(keys + tile * LANES * dim + pair * 32);
                if (next) next->ask(from, tile * LANES + pair % 16, pair / 16 * 32);
                each<N>([&](auto i) ALWAYS_INLINE { sum[i][t] = two.times(queries + i * dim + 2 * pair, sum[i][t]); });
            });
        each<N>([&](auto i) ALWAYS_INLINE {
            each<AT_ONCE>([&](auto t) ALWAYS_INLINE { to[i][first + t] = sum[i][t]; });
        });
    }
}

// 32 dimensions of two keys' values, and what they are multiplied with: sums of half of the dimensions each. EVENLY: whether
// there is time to ask for each row of what comes next.
template <typename Element> struct TwoValues;

template <>
struct TwoValues<float> {  // where registers are wide even dimensions, odd dimensions; else in their order
    static constexpr bool EVENLY = true;
    const bf16 *a, *b;

    TwoValues(const bf16* a, const bf16* b) : a(a), b(b) {}
    static Vec part(const bf16* of, int half) {
#if defined(WIDE_REGISTERS)
        return half ? odds(load_words(of)) : evens(load_words(of));
#else
        return load(of + half * LANES);
#endif
    }
    struct Half {
        Vec first, second;
        Vec times(const float* weights, Vec sum) const { return fma(splat(weights[1]), second, fma(splat(weights[0]), first, sum)); }
    };
    Half half(int which) const { return {part(a, which), part(b, which)}; }
#if defined(WIDE_REGISTERS)
    static __m512i order(int64_t half) {  // of dimensions, in the two sums
        const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        return _mm512_add_epi32(low, _mm512_set1_epi32(int(half) * 8));
    }
#endif
};

#if defined(WIDE_REGISTERS)
template <>
struct TwoValues<bf16> {  // those whose number has no 4 in it, the others: as the processor interleaves two rows
    static constexpr bool EVENLY = false;
    const __m512i a, b;

    TwoValues(const bf16* a, const bf16* b) : a(_mm512_loadu_si512(a)), b(_mm512_loadu_si512(b)) {}
    struct Half {
        __m512i both;
        Vec times(const bf16* weights, Vec sum) const { return TwoInputs<bf16>((const bf16*)&both).times(weights, sum); }
    };
    Half half(int which) const { return {which ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b)}; }
    static __m512i order(int64_t half) {
        const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        return _mm512_add_epi32(low, _mm512_set1_epi32(int(half) * 8));
    }
};
#endif

// mixed[0..N) += weights of a block's first keys times their values, in the order of TwoValues; `in_order` undoes it.
// Asks for the values of `next`.
template <int N, typename Element>
void mix(const Element (*weights)[BLOCK], int64_t count, const bf16* const* values, int64_t dim, float* mixed,
         const Block* next, const bf16* from) {
    for (int64_t d = 0; d < dim; d += 32)
        for (int first = 0; first < 2; first += TOGETHER) {
            Vec sum[N][TOGETHER];
            each<N>([&](auto i) ALWAYS_INLINE {
                each<TOGETHER>([&](auto half) ALWAYS_INLINE { sum[i][half] = load(mixed + i * dim + d + (first + half) * 16); });
            });
            for (int64_t key = 0; key < count; key += 2) {
                if (next && !first && TwoValues<Element>::EVENLY)
                    next->ask(from, key, d), next->ask(from, key + 1, d);
                else if (next && !first && !d && key % LANES == 0)
                    next->prefetch(from, key / LANES, dim);
                const TwoValues<Element> two(values[key] + d, values[key + 1] + d);
                each<TOGETHER>([&](auto half) ALWAYS_INLINE {
                    const auto part = two.half(first + half);
                    each<N>([&](auto i) ALWAYS_INLINE { sum[i][half] = part.times(weights[i] + key, sum[i][half]); });
                });
            }
            each<N>([&](auto i) ALWAYS_INLINE {
                each<TOGETHER>([&](auto half) ALWAYS_INLINE { store(mixed + i * dim + d + (first + half) * 16, sum[i][half]); });
            });
        }
}

// 32 sums of `mix`, divided by `total` and put back in the order of dimensions.
template <typename Element>
void in_order(float* mixed, float total) {
    const Vec low = load(mixed) / total, high = load(mixed + 16) / total;
#if defined(WIDE_REGISTERS)
    for (int64_t half = 0; half < 2; half++)
        _mm512_storeu_ps(mixed + half * 16,
                         _mm512_permutex2var_ps((__m512)low, TwoValues<Element>::order(half), (__m512)high));
#else
    store(mixed, low), store(mixed + 16, high);
#endif
}

// One query's softmax so far, and its next block: scores of `tiles` times 16 keys, of which those in `seen` count,
// become weights.
struct Softmax {
    float top = -INFINITY, total = 0.0f;

    template <typename Element>
    void take(const Vec* scores, const Mask* seen, int64_t tiles, float scale, float* mixed, int64_t dim, Element* weights) {
        Vec x[4], most = splat(top);
        for (int64_t t = 0; t < tiles; t++) {
            x[t] = scores[t] * scale;
            most = where(seen[t], larger(most, x[t]), most);
        }
        const float best = largest(most);
        Vec sums = {};
        for (int64_t t = 0; t < tiles; t++) {
            const Vec weight = where(seen[t], exp_negative(x[t] - best), Vec{});
            put(weights + t * LANES, weight);
            sums = sums + weight;
        }
        if (best != top) {
            const float shrink = top == -INFINITY ? 0.0f : exp_scalar(top - best);
            total *= shrink;
            for (int64_t d = 0; d < dim; d += LANES) store(mixed + d, load(mixed + d) * shrink);
            top = best;
        }
        total += sum(sums);
    }
};

// Which of a block's keys a query sees.
struct Seen {
    Mask tile[4];

    Seen(int64_t first, int64_t query, int64_t window) {
        const IVec lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int64_t t = 0; t < 4; t++) {
            const IVec at = lanes + int32_t(first + t * LANES);
            tile[t] = mask(at <= int32_t(query));
            if (window) tile[t] &= mask(at > int32_t(query - window));
        }
    }
};

// Query vectors 0 to `vectors` of one key/value head, in s.queries: tokens in order, `group` heads of each; the
// first token lies at `position`. `sinks` [group]: each head's score of a key without a value; null: there is none. Leaves their
// mixes in s.mixed. `after` is what will be read next.
template <typename Element>
void attend_as(const Pages& cache, int64_t head, int64_t group, int64_t vectors, int64_t position, int64_t length,
               float scale, int64_t window, const float* sinks, const Block& after, AttentionScratch& s) {
    static constexpr decltype(&score<1, Element>) scoring[] = {score<1, Element>, score<2, Element>, score<3, Element>,
                                                               score<4, Element>};
    static constexpr decltype(&mix<1, Element>) mixing[] = {mix<1, Element>, mix<2, Element>, mix<3, Element>,
                                                            mix<4, Element>};
    const int64_t dim = s.dim, end = position + (vectors + group - 1) / group;
    const Element* queries = s.queries_as(Element{}, vectors);
    Softmax softmax[QUERIES];
    for (int64_t m = 0; sinks && m < vectors; m++) softmax[m] = {sinks[m % group], 1.0f};
    std::fill_n(s.mixed.data(), vectors * dim, 0.0f);
    int64_t first = window ? std::max<int64_t>(0, position - window + 1) / BLOCK * BLOCK : 0;
    Block block(cache, head, first, length);
    for (; first < end; first += BLOCK) {
        const Block next = first + BLOCK >= end ? after : Block(cache, head, first + BLOCK, length);
        const Pages pages = cache.int8 ? widened(cache, block, next, s) : cache;
        const int64_t count = std::min(block.filled, end - first), tiles = (count + LANES - 1) / LANES;
        const bf16* values[BLOCK];
        for (int64_t j = 0; j < tiles * LANES; j++)
            values[j] = j < block.filled ? pages.values + block.at[j] : s.zeros.data();
        for (int64_t t = 0; t < tiles; t++) transpose_keys(pages, block, t, s.keys_as(Element{}) + t * LANES * dim);
        for (int64_t m = 0; m < vectors; m += BESIDE) {
            const int64_t n = std::min(BESIDE, vectors - m);
            Vec scores[BESIDE][4];
            alignas(64) Element weights[BESIDE][BLOCK];
            scoring[n - 1](queries + m * dim, s.keys_as(Element{}), dim, scores, m || cache.int8 ? nullptr : &next, pages.keys);
            for (int64_t i = 0; i < n; i++)
                softmax[m + i].take(scores[i], Seen(first, position + (m + i) / group, window).tile, tiles, scale,
                                    s.mixed.data() + (m + i) * dim, dim, weights[i]);
            mixing[n - 1](weights, count, values, dim, s.mixed.data() + m * dim,
                          m || cache.int8 ? nullptr : &next, pages.values);
        }
        block = next;
    }
    for (int64_t m = 0; m < vectors; m++)
        for (int64_t d = 0; d < dim; d += 32) in_order<Element>(s.mixed.data() + m * dim + d, softmax[m].total);
}

}  // namespace
