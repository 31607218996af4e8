// Attention over latent vectors: all heads of a token read one line of the cache for each key, whose first numbers are the value.
#pragma once
#include <cmath>
#include <vector>
#include "int8_rows.h"

namespace {

struct LatentAttention {
    const void *q, *cache;          // [tokens, heads, dim]; [pages, page_size, dim], or int8 with a scale
    void* out;                      // [tokens, heads, latent]
    const int32_t *row, *seen;      // of each token: its row of page_table, and how many keys it sees, 0 for none
    const int32_t* page_table;
    int64_t tokens, heads, dim, latent, page_size, max_pages;
    int64_t page_stride;  // elements between pages, bytes of an int8 cache
    float scale;
    int64_t int8;
};

constexpr int HEADS = 8;  // that share the keys which one thread has widened
constexpr int AT_ONCE = 4;  // of these, whose sums are in registers at once

inline int64_t lanes_of(int64_t count) { return (count + 2 * LANES - 1) / (2 * LANES) * 2 * LANES; }  // whole pairs of vectors

// A line of the cache as floats, and 0 up to `padded`.
template <typename T>
void widen_line(const LatentAttention& a, int64_t page, int64_t line, int64_t padded, float* to) {
    int64_t d = 0;
    if (a.int8) {
        const char* from = (const char*)a.cache + page * a.page_stride + line * (a.dim + SCALE_BYTES);
        const float scale = scale_of(from, a.dim);
        for (; d < a.dim; d++) to[d] = float(int8_t(from[d])) * scale;
    } else {
        const T* from = (const T*)a.cache + page * a.page_stride + line * a.dim;
        for (; d + LANES <= a.dim; d += LANES) store(to + d, load(from + d));
        for (; d < a.dim; d++) to[d] = widen(from[d]);
    }
    for (; d < padded; d++) to[d] = 0.0f;
}

// `count` heads of a token, from `first` on: online softmax over 16 keys at a time. A score is the sum of its lanes.
template <typename T>
void attend_latent(const LatentAttention& a, int64_t token, int64_t first, int64_t count, float* scratch) {
    const int64_t padded = lanes_of(a.dim), values = lanes_of(a.latent), seen = a.seen[token];
    float* q = scratch;                      // [HEADS][padded]
    float* keys = q + HEADS * padded;        // [16][padded]
    float* acc = keys + LANES * padded;      // [HEADS][values]
    float top[HEADS], total[HEADS];
    std::fill_n(acc, HEADS * values, 0.0f);
    for (int64_t m = 0; m < count; m++) {
        const T* from = (const T*)a.q + (token * a.heads + first + m) * a.dim;
        for (int64_t d = 0; d < padded; d++) q[m * padded + d] = d < a.dim ? widen(from[d]) * a.scale : 0.0f;
        top[m] = -INFINITY;
        total[m] = 0.0f;
    }
    const int32_t* table = a.page_table + a.row[token] * a.max_pages;
    for (int64_t tile = 0; tile < seen; tile += LANES) {
        const int64_t filled = std::min<int64_t>(LANES, seen - tile);
        for (int64_t j = 0; j < filled; j++)
            widen_line<T>(a, table[(tile + j) / a.page_size], (tile + j) % a.page_size, padded, keys + j * padded);
        for (int64_t m = 0; m < count; m += AT_ONCE) {
            float score[AT_ONCE][LANES], weight[AT_ONCE][LANES];
            const float* rows_q[AT_ONCE];
            for (int i = 0; i < AT_ONCE; i++) {
                rows_q[i] = q + std::min(m + i, count - 1) * padded;
                std::fill_n(score[i], LANES, -INFINITY);
            }
            for (int64_t j = 0; j < filled; j++) {
                const float* key = keys + j * padded;
                Vec even[AT_ONCE] = {}, odd[AT_ONCE] = {};
                for (int64_t d = 0; d < padded; d += 2 * LANES) {
                    const Vec first_half = load(key + d), second_half = load(key + d + LANES);
                    each<AT_ONCE>([&](auto i) ALWAYS_INLINE {
                        even[i] += load(rows_q[i] + d) * first_half;
                        odd[i] += load(rows_q[i] + d + LANES) * second_half;
                    });
                }
                each<AT_ONCE>([&](auto i) ALWAYS_INLINE { score[i][j] = sum(even[i] + odd[i]); });
            }
            float shrink[AT_ONCE];
            const int64_t n = std::min<int64_t>(AT_ONCE, count - m);
            for (int64_t i = 0; i < n; i++) {
                const Vec scores = load(score[i]);
                const float best = std::max(top[m + i], largest(scores));
                const Vec weights = select(scores == -INFINITY, Vec{}, exp_negative(scores - best));
                shrink[i] = top[m + i] == -INFINITY ? 0.0f : exp_scalar(top[m + i] - best);
                total[m + i] = total[m + i] * shrink[i] + sum(weights);
                top[m + i] = best;
                store(weight[i], weights);
            }
            for (int64_t i = n; i < AT_ONCE; i++) shrink[i] = 0.0f, std::fill_n(weight[i], LANES, 0.0f);
            for (int64_t c = 0; c < values; c += LANES) {
                float* to = acc + m * values + c;
                Vec mixed[AT_ONCE];
                each<AT_ONCE>([&](auto i) ALWAYS_INLINE { mixed[i] = load(to + i * values) * shrink[i]; });
                for (int64_t j = 0; j < filled; j++) {
                    const Vec value = load(keys + j * padded + c);
                    each<AT_ONCE>([&](auto i) ALWAYS_INLINE { mixed[i] += weight[i][j] * value; });
                }
                each<AT_ONCE>([&](auto i) ALWAYS_INLINE { store(to + i * values, mixed[i]); });
            }
        }
    }
    for (int64_t m = 0; m < count; m++) {
        T* to = (T*)a.out + (token * a.heads + first + m) * a.latent;
        for (int64_t d = 0; d < a.latent; d++) to[d] = seen ? narrow<T>(acc[m * values + d] / total[m]) : narrow<T>(0.0f);
    }
}

template <typename T> void latent_attention(const LatentAttention& a) {
    const int64_t parts = (a.heads + HEADS - 1) / HEADS;
    const size_t scratch = (HEADS + LANES) * lanes_of(a.dim) + HEADS * lanes_of(a.latent);
#pragma omp parallel
    {
        std::vector<float> own(scratch);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a.tokens * parts; i++) {
            const int64_t first = i % parts * HEADS;
            attend_latent<T>(a, i / parts, first, std::min<int64_t>(HEADS, a.heads - first), own.data());
        }
    }
}

}  // namespace
