// The low-rank updates of many adapters in one batch.
#pragma once
#include <vector>
#include "vector.h"

namespace {

struct Module {
    void* y;
    const void *a, *b;
    const int32_t *rank, *pages;
    int64_t out, y_stride, max_pages;
};

struct Sgmv {
    const void* x;
    const int32_t *first_row, *rows, *adapter;
    int64_t segments, in, x_stride, rank_page, modules;
    Module module[4];
};

// dots[i][r] = x_i . a_r for up to 4 rows and 4 ranks, sums in 16 lanes and then across them.
template <typename T>
void dots(const T* const* x, const T* const* a, int64_t in, float (&result)[4][4]) {
    Vec acc[4][4] = {};
    int64_t d = 0;
    for (; d + LANES <= in; d += LANES) {
        Vec left[4], right[4];
        for (int i = 0; i < 4; i++) left[i] = load(x[i] + d);
        for (int r = 0; r < 4; r++) right[r] = load(a[r] + d);
        for (int i = 0; i < 4; i++)
            for (int r = 0; r < 4; r++) acc[i][r] += left[i] * right[r];
    }
    for (int i = 0; i < 4; i++)
        for (int r = 0; r < 4; r++) {
            float tail = sum(acc[i][r]);
            for (int64_t rest = d; rest < in; rest++) tail += widen(x[i][rest]) * widen(a[r][rest]);
            result[i][r] = tail;
        }
}

template <typename T> void sgmv(const Sgmv& s) {
    // Where the shrunk rows of each (segment, module) begin in the shared buffer t.
    std::vector<int64_t> begin(s.segments * s.modules + 1, 0);
    for (int64_t i = 0; i < s.segments; i++)
        for (int64_t m = 0; m < s.modules; m++)
            begin[i * s.modules + m + 1] =
                begin[i * s.modules + m] + int64_t(s.rows[i]) * s.module[m].rank[s.adapter[i]];
    std::vector<float> t(begin.back());
    struct Item {
        int64_t segment, module, first, count;
    };
    std::vector<Item> shrink, expand;
    constexpr int64_t RANKS = 4, COLUMNS = 64;
    for (int64_t i = 0; i < s.segments; i++)
        for (int64_t m = 0; m < s.modules; m++) {
            const int64_t rank = s.module[m].rank[s.adapter[i]];
            if (!rank) continue;
            for (int64_t r = 0; r < rank; r += RANKS) shrink.push_back({i, m, r, std::min(RANKS, rank - r)});
            const int64_t step = std::max<int64_t>(COLUMNS, s.module[m].out / 4 / LANES * LANES);
            for (int64_t c = 0; c < s.module[m].out; c += step)
                expand.push_back({i, m, c, std::min(step, s.module[m].out - c)});
        }
    auto arena_row = [&](const Module& m, int32_t adapter, int64_t r) {
        return m.pages[adapter * m.max_pages + r / s.rank_page] * s.rank_page + r % s.rank_page;
    };
#pragma omp parallel
    {
#pragma omp for schedule(dynamic, 4)
        for (size_t w = 0; w < shrink.size(); w++) {
            const Item item = shrink[w];
            const Module& m = s.module[item.module];
            const int32_t adapter = s.adapter[item.segment];
            const int64_t rank = m.rank[adapter];
            float* to = t.data() + begin[item.segment * s.modules + item.module];
            const T *x[4], *a[4];
            for (int64_t r = 0; r < 4; r++)
                a[r] = (const T*)m.a + arena_row(m, adapter, item.first + std::min(r, item.count - 1)) * s.in;
            for (int64_t row = 0; row < s.rows[item.segment]; row += 4) {
                const int64_t n = std::min<int64_t>(4, s.rows[item.segment] - row);
                for (int64_t i = 0; i < 4; i++)
                    x[i] = (const T*)s.x + (s.first_row[item.segment] + row + std::min(i, n - 1)) * s.x_stride;
                float result[4][4];
                dots(x, a, s.in, result);
                for (int64_t i = 0; i < n; i++)
                    for (int64_t r = 0; r < item.count; r++) to[(row + i) * rank + item.first + r] = result[i][r];
            }
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t w = 0; w < expand.size(); w++) {
            const Item item = expand[w];
            const Module& m = s.module[item.module];
            const int32_t adapter = s.adapter[item.segment];
            const int64_t rank = m.rank[adapter];
            const float* from = t.data() + begin[item.segment * s.modules + item.module];
            for (int64_t row = 0; row < s.rows[item.segment]; row += 4) {
                const int64_t n = std::min<int64_t>(4, s.rows[item.segment] - row);
                const float* left[4];
                T* y[4];
                for (int64_t i = 0; i < 4; i++) {
                    left[i] = from + (row + std::min(i, n - 1)) * rank;
                    y[i] = (T*)m.y + (s.first_row[item.segment] + row + std::min(i, n - 1)) * m.y_stride;
                }
                int64_t c = item.first;
                const int64_t end = item.first + item.count;
                for (; c + 2 * LANES <= end; c += 2 * LANES) {
                    Vec acc[4][2] = {};
                    for (int64_t r = 0; r < rank; r++) {
                        const T* b = (const T*)m.b + arena_row(m, adapter, r) * m.out + c;
                        const Vec b0 = load(b), b1 = load(b + LANES);
                        for (int i = 0; i < 4; i++) {
                            acc[i][0] += left[i][r] * b0;
                            acc[i][1] += left[i][r] * b1;
                        }
                    }
                    for (int64_t i = 0; i < n; i++)
                        for (int h = 0; h < 2; h++)
                            store(y[i] + c + h * LANES, load(y[i] + c + h * LANES) + acc[i][h]);
                }
                for (; c < end; c++)
                    for (int64_t i = 0; i < n; i++) {
                        float acc = 0.0f;
                        for (int64_t r = 0; r < rank; r++)
                            acc += left[i][r] * widen(((const T*)m.b)[arena_row(m, adapter, r) * m.out + c]);
                        y[i][c] = narrow<T>(widen(y[i][c]) + acc);
                    }
            }
        }
    }
}

}  // namespace
