// Attention over the paged cache, and writing to it.
#pragma once
#include <cmath>
#include <vector>
#include "int8_rows.h"

namespace {

struct Attention {
    const void *q, *k_cache, *v_cache;
    void* out;
    const int32_t *query_start, *kv_length, *page_table;
    int64_t rows, heads, kv_heads, dim, page_size, max_pages;
    int64_t q_stride;       // elements between tokens of q
    int64_t page_stride;    // elements between pages of a cache
    float scale;
    int64_t window;         // 0: none
    int64_t int8;           // whether the caches are in int8 (int8_rows.h); page_stride then is in bytes
};

constexpr int BLOCK = 32;  // query vectors (tokens x heads of a group) that share the tiles of a key/value head

// One key/value head of one row, for up to BLOCK query vectors: online softmax over tiles of 16 keys.
template <typename T>
void attend(const Attention& a, int64_t row, int64_t kv_head, int64_t first, int64_t count, float* scratch) {
    const int64_t dim = a.dim, chunks = (dim + LANES - 1) / LANES, padded = chunks * LANES;
    const int64_t group = a.heads / a.kv_heads, vectors = count * group;
    const int64_t start = a.query_start[row], queries = a.query_start[row + 1] - start;
    const int64_t length = a.kv_length[row], base = length - queries + first;  // position of the first query
    float* q = scratch;                          // [BLOCK][padded]
    float* acc = q + BLOCK * padded;             // [BLOCK][padded]
    float* keys = acc + BLOCK * padded;          // [padded][16], transposed
    float* values = keys + padded * LANES;       // [16][padded]
    float* weights = values + padded * LANES;    // [BLOCK][16]
    float top[BLOCK], total[BLOCK];
    for (int64_t m = 0; m < vectors; m++) {
        const T* from = (const T*)a.q + (start + first + m / group) * a.q_stride + (kv_head * group + m % group) * dim;
        for (int64_t d = 0; d < padded; d++) q[m * padded + d] = d < dim ? widen(from[d]) * a.scale : 0.0f;
        std::fill_n(acc + m * padded, padded, 0.0f);
        top[m] = -INFINITY;
        total[m] = 0.0f;
    }
    const int32_t* table = a.page_table + row * a.max_pages;
    int64_t tile = a.window ? std::max<int64_t>(0, base - a.window + 1) / LANES * LANES : 0;
    for (; tile < base + count; tile += LANES) {
        const int64_t filled = std::min<int64_t>(LANES, length - tile);
        for (int64_t j = 0; j < LANES; j++) {
            if (j >= filled) {  // past the end lies what earlier owners left, NaN perhaps
                for (int64_t d = 0; d < padded; d++) keys[d * LANES + j] = values[j * padded + d] = 0.0f;
                continue;
            }
            const int64_t at = tile + j;
            const int64_t page = table[at / a.page_size] * a.page_stride, line = kv_head * a.page_size + at % a.page_size;
            if (a.int8) {
                const int64_t offset = page + line * (dim + SCALE_BYTES);
                const char *k = (const char*)a.k_cache + offset, *v = (const char*)a.v_cache + offset;
                const float k_scale = scale_of(k, dim), v_scale = scale_of(v, dim);
                for (int64_t d = 0; d < dim; d++) keys[d * LANES + j] = float(int8_t(k[d])) * k_scale;
                for (int64_t d = 0; d < dim; d++) values[j * padded + d] = float(int8_t(v[d])) * v_scale;
                for (int64_t d = dim; d < padded; d++) keys[d * LANES + j] = values[j * padded + d] = 0.0f;
                continue;
            }
            const int64_t offset = page + line * dim;
            const T *k = (const T*)a.k_cache + offset, *v = (const T*)a.v_cache + offset;
            for (int64_t d = 0; d < dim; d++) keys[d * LANES + j] = widen(k[d]);
            for (int64_t d = 0; d < dim; d++) values[j * padded + d] = widen(v[d]);
            for (int64_t d = dim; d < padded; d++) keys[d * LANES + j] = values[j * padded + d] = 0.0f;
        }
        IVec position;
        for (int j = 0; j < LANES; j++) position[j] = int32_t(tile + j);
        for (int64_t m = 0; m < vectors; m += 4) {
            const int64_t n = std::min<int64_t>(4, vectors - m);
            Vec score[4] = {};
            const float* rows_q[4];
            for (int64_t i = 0; i < 4; i++) rows_q[i] = q + (m + std::min(i, n - 1)) * padded;
            for (int64_t d = 0; d < dim; d++) {
                const Vec key = load(keys + d * LANES);
                for (int i = 0; i < 4; i++) score[i] += rows_q[i][d] * key;
            }
            for (int64_t i = 0; i < n; i++) {
                const int64_t at = m + i;
                const int32_t query = int32_t(base + at / group);
                IVec seen = position <= query;
                if (a.window) seen &= position > int32_t(query - a.window);
                const float best = std::max(top[at], largest(select(seen, score[i], splat(-INFINITY))));
                if (best == -INFINITY) {  // nothing to see here yet
                    store(weights + at * LANES, Vec{});
                    continue;
                }
                const Vec weight = select(seen, exp_negative(score[i] - best), Vec{});
                const float shrink = top[at] == -INFINITY ? 0.0f : exp_scalar(top[at] - best);
                total[at] = total[at] * shrink + sum(weight);
                top[at] = best;
                store(weights + at * LANES, weight);
                if (shrink != 1.0f)
                    for (int64_t c = 0; c < padded; c += LANES)
                        store(acc + at * padded + c, load(acc + at * padded + c) * shrink);
            }
        }
        for (int64_t m = 0; m < vectors; m++)
            for (int64_t c = 0; c < padded; c += LANES) {
                Vec mixed = load(acc + m * padded + c);
                for (int j = 0; j < LANES; j++) mixed += weights[m * LANES + j] * load(values + j * padded + c);
                store(acc + m * padded + c, mixed);
            }
    }
    for (int64_t m = 0; m < vectors; m++) {
        T* to = (T*)a.out + ((start + first + m / group) * a.heads + kv_head * group + m % group) * dim;
        for (int64_t d = 0; d < dim; d++) to[d] = narrow<T>(acc[m * padded + d] / total[m]);
    }
}

template <typename T> void paged_attention(const Attention& a) {
    struct Item {
        int64_t row, kv_head, first, count;
    };
    std::vector<Item> items;
    const int64_t group = a.heads / a.kv_heads, block = std::max<int64_t>(1, BLOCK / group);
    for (int64_t row = 0; row < a.rows; row++) {
        const int64_t queries = a.query_start[row + 1] - a.query_start[row];
        for (int64_t first = 0; first < queries; first += block)
            for (int64_t head = 0; head < a.kv_heads; head++)
                items.push_back({row, head, first, std::min(block, queries - first)});
    }
    const int64_t padded = (a.dim + LANES - 1) / LANES * LANES;
#pragma omp parallel
    {
        std::vector<float> scratch(2 * BLOCK * padded + 2 * LANES * padded + BLOCK * LANES);
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < items.size(); i++)
            attend<T>(a, items[i].row, items[i].kv_head, items[i].first, items[i].count, scratch.data());
    }
}

template <typename T>
void append_kv(const T* k, const T* v, T* k_cache, T* v_cache, const int64_t* index, int64_t tokens, int64_t heads,
               int64_t dim, int64_t page_size, int64_t k_stride, int64_t v_stride, int64_t page_stride) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t to = index[t] / page_size * page_stride + (h * page_size + index[t] % page_size) * dim;
            std::memcpy(k_cache + to, k + t * k_stride + h * dim, dim * sizeof(T));
            std::memcpy(v_cache + to, v + t * v_stride + h * dim, dim * sizeof(T));
        }
}

template <typename T>
void append_kv_int8(const T* k, const T* v, char* k_cache, char* v_cache, const int64_t* index, int64_t tokens,
                    int64_t heads, int64_t dim, int64_t page_size, int64_t k_stride, int64_t v_stride,
                    int64_t page_stride) {
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const int64_t line = h * page_size + index[t] % page_size;
            const int64_t to = index[t] / page_size * page_stride + line * (dim + SCALE_BYTES);
            quantize_row(k + t * k_stride + h * dim, dim, k_cache + to);
            quantize_row(v + t * v_stride + h * dim, dim, v_cache + to);
        }
}

}  // namespace
