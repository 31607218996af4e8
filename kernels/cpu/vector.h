// Sixteen floats at a time: conversions from and to bfloat16, sums, and an exponential.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));

struct bf16 {
    uint16_t bits;
};
struct half {  // IEEE 754's of 16 bits
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

}  // namespace
