// The operators for the CPU, behind a C interface; kernels/reference.py says what each of them computes.
//
// Vectors are GCC/Clang vector extensions of 16 floats: one AVX-512 register, or several narrower ones elsewhere.
// Every sum runs in an order that depends on the row alone (16 keys at a time, from the first on), never on its
// neighbours in the batch or on the number of threads: a row's result is the same bits alone or in company.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
template <typename T> T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return {uint16_t((bits >> 16) | 0x40)};  // NaN stays NaN
    return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};                  // to nearest, ties to even
}

inline Vec splat(float x) { return x - Vec{}; }
inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
inline Vec load(const bf16* p) {
    typedef uint16_t Half __attribute__((vector_size(32)));
    Half h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, IVec) << 16);
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline void store(bf16* p, Vec v) {
    for (int i = 0; i < LANES; i++) p[i] = narrow<bf16>(v[i]);
}
inline float sum(Vec v) {
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}
inline float largest(Vec v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = std::max(m, v[i]);
    return m;
}
inline Vec select(IVec mask, Vec yes, Vec no) { return (Vec)((mask & (IVec)yes) | (~mask & (IVec)no)); }

// exp(x) for x <= 0, within 2 units in the last place; 0 below -87.
inline Vec exp_negative(Vec x) {
    Vec clamped = select(x < -87.0f, splat(-87.0f), x);
    Vec n = clamped * 1.44269504f + 12582912.0f;  // round to an integer in the low bits
    IVec exponent = ((IVec)n - 0x4b400000) << 23;
    n -= 12582912.0f;
    Vec r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return select(x < -87.0f, Vec{}, (Vec)((IVec)p + exponent));
}

inline float exp_scalar(float x) { return exp_negative(splat(x))[0]; }

// ---- attention ------------------------------------------------------------------------------------------

struct Attention {
    const void *q, *k_cache, *v_cache;
    void* out;
    const int32_t *query_start, *kv_length, *page_table;
    int64_t rows, heads, kv_heads, dim, page_size, max_pages;
    int64_t q_stride;       // elements between tokens of q
    int64_t page_stride;    // elements between pages of a cache
    float scale;
    int64_t window;         // 0: none
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
            const int64_t offset =
                table[at / a.page_size] * a.page_stride + (kv_head * a.page_size + at % a.page_size) * dim;
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

// ---- SGMV -----------------------------------------------------------------------------------------------

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

// ---- row by row -----------------------------------------------------------------------------------------

constexpr int64_t SERIAL = 16384;  // elements under which a second thread costs more than it brings

template <typename T>
void rms_norm(const T* x, const T* residual, const T* weight, T* y, T* total, int64_t outer, int64_t inner, int64_t n,
              int64_t outer_stride, int64_t inner_stride, float eps) {
#pragma omp parallel for if (outer * inner * n > SERIAL)
    for (int64_t row = 0; row < outer * inner; row++) {
        const T* from = x + row / inner * outer_stride + row % inner * inner_stride;
        if (residual) {
            T* s = total + row * n;
            const T* r = residual + row * n;
            for (int64_t d = 0; d < n; d++) s[d] = narrow<T>(widen(from[d]) + widen(r[d]));
            from = s;
        }
        Vec squares = {};
        int64_t d = 0;
        for (; d + LANES <= n; d += LANES) {
            const Vec v = load(from + d);
            squares += v * v;
        }
        float mean = sum(squares);
        for (; d < n; d++) mean += widen(from[d]) * widen(from[d]);
        const float scale = 1.0f / __builtin_sqrtf(mean / n + eps);
        for (d = 0; d < n; d++) y[row * n + d] = narrow<T>(widen(from[d]) * scale * widen(weight[d]));
    }
}

template <typename T>
void rotary(T* x, const int64_t* positions, const float* cos, const float* sin, int64_t tokens, int64_t heads,
            int64_t dim, int64_t stride, int64_t head_stride) {
    const int64_t half = dim / 2;
#pragma omp parallel for if (tokens * heads * dim > SERIAL)
    for (int64_t t = 0; t < tokens; t++) {
        const float *c = cos + positions[t] * half, *s = sin + positions[t] * half;
        for (int64_t h = 0; h < heads; h++) {
            T* v = x + t * stride + h * head_stride;
            for (int64_t d = 0; d < half; d++) {
                const float first = widen(v[d]), second = widen(v[d + half]);
                v[d] = narrow<T>(first * c[d] - second * s[d]);
                v[d + half] = narrow<T>(second * c[d] + first * s[d]);
            }
        }
    }
}

template <typename T> void silu_and_mul(const T* x, T* y, int64_t tokens, int64_t inner, int64_t stride) {
#pragma omp parallel for if (tokens * inner > SERIAL)
    for (int64_t t = 0; t < tokens; t++) {
        const T *gate = x + t * stride, *up = gate + inner;
        T* to = y + t * inner;
        auto silu = [](Vec g) {  // through exp(-|g|), which cannot overflow
            const Vec e = exp_negative(select(g < 0.0f, g, -g));
            return g * select(g < 0.0f, e, splat(1.0f)) / (e + 1.0f);
        };
        int64_t d = 0;
        for (; d + LANES <= inner; d += LANES) store(to + d, silu(load(gate + d)) * load(up + d));
        for (; d < inner; d++) to[d] = narrow<T>(silu(splat(widen(gate[d])))[0] * widen(up[d]));
    }
}

}  // namespace

#define DISPATCH(CALL_FLOAT, CALL_BF16) \
    if (type == 0)                      \
        CALL_FLOAT;                     \
    else                                \
        CALL_BF16;

extern "C" {

void personae_paged_attention(int type, const Attention* a) {
    DISPATCH(paged_attention<float>(*a), paged_attention<bf16>(*a))
}

void personae_append_kv(int type, const void* k, const void* v, void* kc, void* vc, const int64_t* index,
                        int64_t tokens, int64_t heads, int64_t dim, int64_t page_size, int64_t k_stride,
                        int64_t v_stride, int64_t page_stride) {
    DISPATCH(append_kv((const float*)k, (const float*)v, (float*)kc, (float*)vc, index, tokens, heads, dim, page_size,
                       k_stride, v_stride, page_stride),
             append_kv((const bf16*)k, (const bf16*)v, (bf16*)kc, (bf16*)vc, index, tokens, heads, dim, page_size,
                       k_stride, v_stride, page_stride))
}

void personae_sgmv(int type, const Sgmv* s) { DISPATCH(sgmv<float>(*s), sgmv<bf16>(*s)) }

void personae_rms_norm(int type, const void* x, const void* residual, const void* weight, void* y, void* total,
                       int64_t outer, int64_t inner, int64_t n, int64_t outer_stride, int64_t inner_stride,
                       float eps) {
    DISPATCH(rms_norm((const float*)x, (const float*)residual, (const float*)weight, (float*)y, (float*)total, outer,
                      inner, n, outer_stride, inner_stride, eps),
             rms_norm((const bf16*)x, (const bf16*)residual, (const bf16*)weight, (bf16*)y, (bf16*)total, outer,
                      inner, n, outer_stride, inner_stride, eps))
}

void personae_rotary(int type, void* x, const int64_t* positions, const float* cos, const float* sin, int64_t tokens,
                     int64_t heads, int64_t dim, int64_t stride, int64_t head_stride) {
    DISPATCH(rotary((float*)x, positions, cos, sin, tokens, heads, dim, stride, head_stride),
             rotary((bf16*)x, positions, cos, sin, tokens, heads, dim, stride, head_stride))
}

void personae_silu_and_mul(int type, const void* x, void* y, int64_t tokens, int64_t inner, int64_t stride) {
    DISPATCH(silu_and_mul((const float*)x, (float*)y, tokens, inner, stride),
             silu_and_mul((const bf16*)x, (bf16*)y, tokens, inner, stride))
}
}
