// Sixteen floats or whole numbers at a time, on any set of instructions: one register, or some that are narrower. Everything
// else is written once, on top of this; where a set has an instruction of its own for something, that is in here.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#if __ARM_FEATURE_SVE_BITS == 256 || __ARM_FEATURE_SVE_BITS == 512
#define SVE 1  // of registers whose length is known; of others NEON's part is used
#include <arm_sve.h>
#endif
#endif

namespace {

#define ALWAYS_INLINE __attribute__((always_inline))

constexpr int LANES = 16;

// f(0) to f(N - 1), of constants, so that an array of vectors that they index becomes registers.
template <typename F, int... I>
ALWAYS_INLINE inline void each_of(std::integer_sequence<int, I...>, F f) {
    (f(std::integral_constant<int, I>()), ...);
}
template <int N, typename F>
ALWAYS_INLINE inline void each(F f) {
    each_of(std::make_integer_sequence<int, N>(), f);
}

// What f gives for 0 to N - 1.
template <typename F, int... I>
inline auto each_made_of(std::integer_sequence<int, I...>, F f) {
    return std::array{f(std::integral_constant<int, I>())...};
}
template <int N, typename F>
inline auto each_made(F f) {
    return each_made_of(std::make_integer_sequence<int, N>(), f);
}

#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define WIDE_REGISTERS 1  // AVX-512's
constexpr int WIDTH = LANES, REGISTERS = 32;  // lanes of a register; how many there are
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
#else
#if defined(__AVX2__)
constexpr int WIDTH = 8, REGISTERS = 16;
#elif defined(SVE)
constexpr int WIDTH = __ARM_FEATURE_SVE_BITS / 32, REGISTERS = 32;
#else
constexpr int WIDTH = 4, REGISTERS = 32;
#endif
typedef float Part __attribute__((vector_size(WIDTH * 4)));
typedef int32_t IPart __attribute__((vector_size(WIDTH * 4)));

// Sixteen lanes in registers of WIDTH. (GCC keeps a vector type that is wider than a register in memory, a struct of registers
// not.)
template <typename E, typename P>
struct Lanes {
    static constexpr int PARTS = LANES / WIDTH;
    P part[PARTS];

    Lanes() = default;
    template <typename... All, typename = std::enable_if_t<sizeof...(All) == LANES>>
    Lanes(All... all) {
        const E each[] = {E(all)...};
        std::memcpy(part, each, sizeof part);
    }
    template <typename E2, typename P2>
    ALWAYS_INLINE explicit Lanes(const Lanes<E2, P2>& bits) {
        each<PARTS>([&](auto i) ALWAYS_INLINE { part[i] = (P)bits.part[i]; });
    }
    E& operator[](int i) { return ((E*)part)[i]; }
    E operator[](int i) const { return ((const E*)part)[i]; }
};
typedef Lanes<float, Part> Vec;
typedef Lanes<int32_t, IPart> IVec;

// `of` each part. Written out, not as a loop: GCC 12 unrolls too late to keep parts in registers then.
template <typename To, typename Of, size_t... I, typename... Args>
ALWAYS_INLINE inline To by_part_of(std::index_sequence<I...>, Of of, const Args&... args) {
    To to;
    auto one = [&](auto i) ALWAYS_INLINE { to.part[i] = (std::remove_reference_t<decltype(to.part[0])>)of(args.part[i]...); };
    (one(std::integral_constant<size_t, I>()), ...);
    return to;
}
template <typename To, typename Of, typename... Args>
ALWAYS_INLINE inline To by_part(Of of, const Args&... args) {
    return by_part_of<To>(std::make_index_sequence<size_t(To::PARTS)>(), of, args...);
}
#define OPERATOR(OP, V, SCALAR, RESULT)                                                                         \
    ALWAYS_INLINE inline RESULT operator OP(const V& a, const V& b) {                                                         \
        return by_part<RESULT>([](auto x, auto y) { return x OP y; }, a, b);                                    \
    }                                                                                                           \
    ALWAYS_INLINE inline RESULT operator OP(const V& a, SCALAR b) {                                                           \
        return by_part<RESULT>([b](auto x) { return x OP b; }, a);                                              \
    }                                                                                                           \
    ALWAYS_INLINE inline RESULT operator OP(SCALAR a, const V& b) {                                                           \
        return by_part<RESULT>([a](auto x) { return a OP x; }, b);                                              \
    }
OPERATOR(+, Vec, float, Vec)
OPERATOR(-, Vec, float, Vec)
OPERATOR(*, Vec, float, Vec)
OPERATOR(/, Vec, float, Vec)
OPERATOR(<, Vec, float, IVec)
OPERATOR(>, Vec, float, IVec)
OPERATOR(<=, Vec, float, IVec)
OPERATOR(>=, Vec, float, IVec)
OPERATOR(==, Vec, float, IVec)
OPERATOR(!=, Vec, float, IVec)
OPERATOR(+, IVec, int32_t, IVec)
OPERATOR(-, IVec, int32_t, IVec)
OPERATOR(&, IVec, int32_t, IVec)
OPERATOR(|, IVec, int32_t, IVec)
OPERATOR(^, IVec, int32_t, IVec)
OPERATOR(<<, IVec, int32_t, IVec)
OPERATOR(>>, IVec, int32_t, IVec)
OPERATOR(<=, IVec, int32_t, IVec)
OPERATOR(>, IVec, int32_t, IVec)
OPERATOR(!=, IVec, int32_t, IVec)
#undef OPERATOR
inline Vec operator-(const Vec& a) { return by_part<Vec>([](auto x) { return -x; }, a); }
inline IVec operator~(const IVec& a) { return by_part<IVec>([](auto x) { return ~x; }, a); }
inline Vec& operator+=(Vec& a, const Vec& b) { return a = a + b; }
inline IVec& operator|=(IVec& a, const IVec& b) { return a = a | b; }
inline Vec& operator-=(Vec& a, float b) { return a = a - b; }
inline IVec& operator&=(IVec& a, const IVec& b) { return a = a & b; }
#endif

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

template <typename V> inline V load_bits(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
#if defined(__F16C__)
inline float widen(half x) { return _cvtsh_ss(x.bits); }
template <> inline half narrow<half>(float x) { return {_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)}; }
#elif defined(__aarch64__)
inline float widen(half x) { return load_bits<__fp16>(&x); }
template <> inline half narrow<half>(float x) { return load_bits<half>(std::array<__fp16, 1>{__fp16(x)}.data()); }
#endif
#if defined(WIDE_REGISTERS)
inline Vec load(const float* p) { return load_bits<Vec>(p); }
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline IVec load_words(const void* p) { return load_bits<IVec>(p); }
#else
template <typename V> ALWAYS_INLINE inline V load_parts(const void* p) {
    V v;
    each<V::PARTS>([&](auto i) ALWAYS_INLINE { std::memcpy(&v.part[i], (const char*)p + i * WIDTH * 4, WIDTH * 4); });
    return v;
}
ALWAYS_INLINE inline Vec load(const float* p) { return load_parts<Vec>(p); }
ALWAYS_INLINE inline void store(float* p, const Vec& v) {
    each<Vec::PARTS>([&](auto i) ALWAYS_INLINE { std::memcpy(p + i * WIDTH, &v.part[i], WIDTH * 4); });
}
ALWAYS_INLINE inline IVec load_words(const void* p) { return load_parts<IVec>(p); }
#endif
inline Vec select(IVec mask, Vec yes, Vec no) { return (Vec)((mask & (IVec)yes) | (~mask & (IVec)no)); }

#if defined(WIDE_REGISTERS)
inline Vec splat(float x) { return x - Vec{}; }
inline IVec splat(int32_t x) { return x - IVec{}; }
inline Vec fma(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline Vec floats(IVec v) { return (Vec)_mm512_cvtepi32_ps((__m512i)v); }
inline IVec nearest(Vec v) { return (IVec)_mm512_cvtps_epi32((__m512)v); }  // ties to even
inline Vec load(const bf16* p) {
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline Vec load(const half* p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline float sum(Vec v) { return _mm512_reduce_add_ps((__m512)v); }  // halves added to halves
inline float largest(Vec v) { return _mm512_reduce_max_ps((__m512)v); }
inline Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
#else
template <typename V, typename E> inline V splat_parts(E x) {
    return by_part<V>([x](auto zero) { return x - zero; }, V{});
}
inline Vec splat(float x) { return splat_parts<Vec>(x); }
inline IVec splat(int32_t x) { return splat_parts<IVec>(x); }
inline Vec floats(IVec v) { return by_part<Vec>([](auto x) { return __builtin_convertvector(x, Part); }, v); }
inline Vec larger(Vec a, Vec b) { return select(a > b, a, b); }
#if defined(__AVX2__)
// All lanes as one, halves with halves; `of` two registers of eight or of four.
template <typename Of>
inline __m128i halved(__m256i low, __m256i high, Of of) {
    const __m256i eight = of(low, high);
    const auto with = [&](__m128i a, __m128i b) {
        return _mm256_castsi256_si128(of(_mm256_castsi128_si256(a), _mm256_castsi128_si256(b)));
    };
    const __m128i four = with(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = with(four, _mm_shuffle_epi32(four, 0x4e));
    return with(two, _mm_shuffle_epi32(two, 0xb1));
}
template <typename Of>
inline float halved(Vec v, Of of) {
    auto both = [&](__m256i a, __m256i b) { return (__m256i)of((__m256)a, (__m256)b); };
    return _mm_cvtss_f32((__m128)halved((__m256i)v.part[0], (__m256i)v.part[1], both));
}
inline float sum(Vec v) {
    return halved(v, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
}
inline float largest(Vec v) {
    return halved(v, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); });
}
#elif defined(SVE)
// The parts, one or two, as one.
template <typename E, typename P, typename Of>
inline P together(const Lanes<E, P>& v, Of of) {
    return v.PARTS > 1 ? P(of(v.part[0], v.part[v.PARTS - 1])) : v.part[0];
}
inline float sum(Vec v) {
    Part all = together(v, [](Part a, Part b) { return a + b; });
    if (Vec::PARTS == 1) all += (Part)svext_f32(all, all, 8);
    all += (Part)svext_f32(all, all, 4);
    all += (Part)svext_f32(all, all, 2);
    all += (Part)svext_f32(all, all, 1);
    return all[0];
}
inline float largest(Vec v) {
    return svmaxnmv_f32(svptrue_b32(), together(v, [](Part a, Part b) { return svmaxnm_f32_x(svptrue_b32(), a, b); }));
}
#else
inline float sum(Vec v) {
    Part all = v.part[0] + v.part[2] + (v.part[1] + v.part[3]);
    return all[0] + all[2] + (all[1] + all[3]);
}
inline float largest(Vec v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = std::max(m, v[i]);
    return m;
}
#endif
#if defined(__AVX2__)
inline Vec fma(Vec a, Vec b, Vec c) {
    return by_part<Vec>([](auto x, auto y, auto z) { return _mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); }, a, b, c);
}
inline IVec nearest(Vec v) {
    return by_part<IVec>([](auto x) { return _mm256_cvtps_epi32((__m256)x); }, v);
}
inline Vec load(const bf16* p) {
    Vec v;
    each<2>([&](auto i) ALWAYS_INLINE {
        v.part[i] = (Part)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + i * 8))), 16);
    });
    return v;
}
inline Vec load(const half* p) {
    Vec v;
    each<2>([&](auto i) ALWAYS_INLINE { v.part[i] = (Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + i * 8))); });
    return v;
}
#elif defined(SVE)
inline Vec fma(Vec a, Vec b, Vec c) {
    return by_part<Vec>([](Part x, Part y, Part z) ALWAYS_INLINE { return Part(svmla_f32_x(svptrue_b32(), z, x, y)); }, a, b, c);
}
inline IVec nearest(Vec v) {
    return by_part<IVec>([](Part x) ALWAYS_INLINE { return IPart(svcvt_s32_f32_x(svptrue_b32(), svrintn_f32_x(svptrue_b32(), x))); }, v);
}
template <typename Of>
inline Vec load_words_of_16(const uint16_t* p, Of of) {
    Vec v;
    each<Vec::PARTS>([&](auto i) ALWAYS_INLINE { v.part[i] = of(svld1uh_u32(svptrue_b32(), p + i * WIDTH)); });
    return v;
}
inline Vec load(const bf16* p) {
    auto upper = [](svuint32_t bits) ALWAYS_INLINE { return svreinterpret_f32_u32(svlsl_n_u32_x(svptrue_b32(), bits, 16)); };
    return load_words_of_16((const uint16_t*)p, upper);
}
inline Vec load(const half* p) {
    auto wide = [](svuint32_t bits) ALWAYS_INLINE { return svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_u32(bits)); };
    return load_words_of_16((const uint16_t*)p, wide);
}
#elif defined(__aarch64__)
inline Vec fma(Vec a, Vec b, Vec c) {
    return by_part<Vec>([](auto x, auto y, auto z) { return vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y); }, a, b, c);
}
inline IVec nearest(Vec v) {
    return by_part<IVec>([](auto x) { return vcvtnq_s32_f32((float32x4_t)x); }, v);
}
inline Vec load(const bf16* p) {
    Vec v;
    each<4>([&](auto i) ALWAYS_INLINE { v.part[i] = (Part)vshll_n_u16(vld1_u16((const uint16_t*)p + i * 4), 16); });
    return v;
}
inline Vec load(const half* p) {
    Vec v;
    each<4>([&](auto i) ALWAYS_INLINE {
        v.part[i] = (Part)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p + i * 4)));
    });
    return v;
}
#else  // no set that the fused decoder is for
inline Vec load(const bf16* p) {
    Vec v;
    for (int i = 0; i < LANES; i++) v[i] = widen(p[i]);
    return v;
}
#endif
#endif

#if !defined(WIDE_REGISTERS)
// The upper half of each lane.
inline void store_upper(bf16* p, IVec v) {
#if defined(__AVX2__)
    const __m256i low = _mm256_srli_epi32((__m256i)v.part[0], 16), high = _mm256_srli_epi32((__m256i)v.part[1], 16);
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
#elif defined(SVE)
    each<IVec::PARTS>([&](auto i) ALWAYS_INLINE {
        const svuint32_t upper = svlsr_n_u32_x(svptrue_b32(), svreinterpret_u32_s32(v.part[i]), 16);
        svst1h_u32(svptrue_b32(), (uint16_t*)p + i * WIDTH, upper);
    });
#else
    for (int i = 0; i < IVec::PARTS; i++) {
        typedef uint16_t Narrow __attribute__((vector_size(WIDTH * 2)));
        const Narrow high = __builtin_convertvector(v.part[i] >> 16, Narrow);
        std::memcpy(p + i * WIDTH, &high, sizeof high);
    }
#endif
}
#endif

// To bfloat16, as `narrow`.
inline void store(bf16* p, Vec v) {
#if defined(WIDE_REGISTERS)
    for (int i = 0; i < LANES; i++) p[i] = narrow<bf16>(v[i]);
#else
    const IVec bits = (IVec)v, even = bits + 0x7fff + ((bits >> 16) & 1);
    store_upper(p, (IVec)select((bits & 0x7fffffff) > 0x7f800000, (Vec)(bits | 0x400000), (Vec)even));
#endif
}

// What comparisons give, for masked operations.
#if defined(WIDE_REGISTERS)
typedef __mmask16 Mask;
inline Mask mask(IVec compared) { return _mm512_movepi32_mask((__m512i)compared); }
inline Vec where(Mask m, Vec yes, Vec no) { return (Vec)_mm512_mask_blend_ps(m, (__m512)no, (__m512)yes); }
#else
typedef IVec Mask;
inline Mask mask(IVec compared) { return compared; }
inline Vec where(Mask m, Vec yes, Vec no) { return select(m, yes, no); }
#endif

inline IVec signed_bytes(const char* p) {
#if defined(WIDE_REGISTERS)
    return (IVec)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
#else
    IVec v;
    each<IVec::PARTS>([&](auto i) ALWAYS_INLINE {
#if defined(__AVX2__)  // for which GCC 12 converts vectors of bytes one by one
        v.part[i] = (IPart)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + i * WIDTH)));
#elif defined(SVE)
        v.part[i] = svld1sb_s32(svptrue_b32(), (const int8_t*)p + i * WIDTH);
#else
        typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
        v.part[i] = __builtin_convertvector(load_bits<Bytes>(p + i * WIDTH), IPart);
#endif
    });
    return v;
#endif
}

// Sixteen bytes that bytes from 0 to 15 are looked up in.
struct Table {
    Table() = default;
#if defined(WIDE_REGISTERS)
    ALWAYS_INLINE explicit Table(const int8_t* bytes) : bytes(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)bytes))) {}
    ALWAYS_INLINE IVec of(IVec places) const { return (IVec)_mm512_shuffle_epi8(bytes, (__m512i)places); }

    __m512i bytes;
#elif defined(__AVX2__)
    ALWAYS_INLINE explicit Table(const int8_t* bytes)
        : bytes(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)bytes))) {}
    ALWAYS_INLINE IVec of(IVec places) const {
        return by_part<IVec>([this](auto p) ALWAYS_INLINE { return _mm256_shuffle_epi8(bytes, (__m256i)p); }, places);
    }

    __m256i bytes;
#elif defined(SVE)
    ALWAYS_INLINE explicit Table(const int8_t* bytes) : bytes(svreinterpret_s32_s8(svld1rq_s8(svptrue_b8(), bytes))) {}
    ALWAYS_INLINE IVec of(IVec places) const {
        return by_part<IVec>([this](IPart p) ALWAYS_INLINE {
            return IPart(svreinterpret_s32_s8(svtbl_s8(svreinterpret_s8_s32(bytes), svreinterpret_u8_s32(p))));
        }, places);
    }

    IPart bytes;
#elif defined(__aarch64__)
    ALWAYS_INLINE explicit Table(const int8_t* bytes) : bytes(vld1q_s8(bytes)) {}
    ALWAYS_INLINE IVec of(IVec places) const {
        return by_part<IVec>([this](auto p) ALWAYS_INLINE { return vqtbl1q_s8(bytes, (uint8x16_t)p); }, places);
    }

    int8x16_t bytes;
#endif
};

#if defined(__aarch64__)
// The lanes of a and of b in turn, EACH of them (one or two): the lower half of that, or the upper.
template <int EACH, bool UPPER>
ALWAYS_INLINE inline IPart woven(IPart a, IPart b) {
#if defined(SVE)
    if constexpr (EACH == 1) return UPPER ? IPart(svzip2_s32(a, b)) : IPart(svzip1_s32(a, b));
    const svint64_t c = svreinterpret_s64_s32(a), d = svreinterpret_s64_s32(b);
    return UPPER ? IPart(svreinterpret_s32_s64(svzip2_s64(c, d))) : IPart(svreinterpret_s32_s64(svzip1_s64(c, d)));
#else
    if constexpr (EACH == 1) return (IPart)(UPPER ? vzip2q_s32((int32x4_t)a, (int32x4_t)b) : vzip1q_s32((int32x4_t)a, (int32x4_t)b));
    return (IPart)(UPPER ? vzip2q_s64((int64x2_t)a, (int64x2_t)b) : vzip1q_s64((int64x2_t)a, (int64x2_t)b));
#endif
}
template <int EACH>
ALWAYS_INLINE inline void weave(const IVec& a, const IVec& b, IVec (&to)[2]) {
    each<2 * IVec::PARTS>([&](auto i) ALWAYS_INLINE {
        to[i / IVec::PARTS].part[i % IVec::PARTS] = woven<EACH, i % 2 == 1>(a.part[i / 2], b.part[i / 2]);
    });
}
#endif

// The lower byte of each lane.
inline void store_bytes(int8_t* to, IVec v) {
#if defined(WIDE_REGISTERS)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
    const IVec bytes = v & 255;
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)bytes.part[0], (__m256i)bytes.part[1]), 0xd8);
    _mm_storeu_si128((__m128i*)to, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#elif defined(SVE)
    each<IVec::PARTS>([&](auto i) ALWAYS_INLINE { svst1b_s32(svptrue_b32(), to + i * WIDTH, v.part[i]); });
#else
    for (int i = 0; i < IVec::PARTS; i++) {
        typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
        const Bytes bytes = __builtin_convertvector(v.part[i], Bytes);
        std::memcpy(to + i * WIDTH, &bytes, sizeof bytes);
    }
#endif
}
inline int32_t sum(IVec v) {
#if defined(WIDE_REGISTERS)
    return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
    auto both = [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); };
    return _mm_cvtsi128_si32(halved((__m256i)v.part[0], (__m256i)v.part[1], both));
#elif defined(SVE)
    return int32_t(svaddv_s32(svptrue_b32(), together(v, [](IPart a, IPart b) { return a + b; })));
#else
    int32_t all = 0;
    for (int i = 0; i < LANES; i++) all += v[i];
    return all;
#endif
}
inline int32_t largest(IVec v) {
#if defined(WIDE_REGISTERS)
    return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__AVX2__)
    auto both = [](__m256i a, __m256i b) { return _mm256_max_epi32(a, b); };
    return _mm_cvtsi128_si32(halved((__m256i)v.part[0], (__m256i)v.part[1], both));
#elif defined(SVE)
    return svmaxv_s32(svptrue_b32(), together(v, [](IPart a, IPart b) { return svmax_s32_x(svptrue_b32(), a, b); }));
#else
    int32_t m = v[0];
    for (int i = 1; i < LANES; i++) m = std::max(m, v[i]);
    return m;
#endif
}

// The first `count` of them.
inline void store_first(float* p, Vec v, int64_t count) {
#if defined(WIDE_REGISTERS)
    _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)v);
#elif defined(SVE)
    each<Vec::PARTS>([&](auto i) ALWAYS_INLINE { svst1_f32(svwhilelt_b32_s64(i * WIDTH, count), p + i * WIDTH, v.part[i]); });
#else
    if (count == LANES) return store(p, v);
    for (int i = 0; i < count; i++) p[i] = v[i];
#endif
}

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
