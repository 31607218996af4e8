// What works row by row: norms, rotary embedding, gates.
#pragma once
#include "vector.h"

namespace {

constexpr int64_t SERIAL = 16384;  // elements under which a second thread costs more than it brings

template <typename T>
void rms_norm(const T* x, const T* residual, const float* weight, T* y, T* total, int64_t outer, int64_t inner,
              int64_t n, int64_t outer_stride, int64_t inner_stride, float eps) {
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
        for (d = 0; d < n; d++) y[row * n + d] = narrow<T>(widen(from[d]) * scale * weight[d]);
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

// act(gate) * up, act(g) = g / (1 + exp(-z)): z = g is SiLU, z = 2 sqrt(2 / pi) (g + 0.044715 g^3) is GELU's tanh form.
template <bool GELU, typename T> void act_and_mul(const T* x, T* y, int64_t tokens, int64_t inner, int64_t stride) {
#pragma omp parallel for if (tokens * inner > SERIAL)
    for (int64_t t = 0; t < tokens; t++) {
        const T *gate = x + t * stride, *up = gate + inner;
        T* to = y + t * inner;
        auto act = [](Vec g) {  // through exp(-|z|), which cannot overflow
            const Vec z = GELU ? 1.5957691216f * (g + 0.044715f * g * g * g) : g;
            const Vec e = exp_negative(select(z < 0.0f, z, -z));
            return g * select(z < 0.0f, e, splat(1.0f)) / (e + 1.0f);
        };
        int64_t d = 0;
        for (; d + LANES <= inner; d += LANES) store(to + d, act(load(gate + d)) * load(up + d));
        for (; d < inner; d++) to[d] = narrow<T>(act(splat(widen(gate[d])))[0] * widen(up[d]));
    }
}

}  // namespace
