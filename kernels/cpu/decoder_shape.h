// What a decoder is made of and what a step gives it, as `fused.py` fills them in; and the functions between products.
#pragma once
#include "experts.h"
#include "lowrank.h"

namespace {

struct DecoderLayer {
    const Packed *qkv, *o, *gate_up, *down;  // the last two are null where there are only experts
    const float *attention_norm, *mlp_norm;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias;  // null: none
    const float *q_norm, *k_norm;                               // null: none
    const float *cos, *sin;                                     // [positions][turned / 2]; null: no rotation
    const float* sinks;                                         // [heads], scores of a key without a value; null: none
    int64_t window;                                             // 0: none
    int64_t whole_norms;                                        // those of q and k are over all heads, not each
    // A mixture of experts; gate_up and down are then an MLP that all tokens use too. router null: there is none.
    const Packed *router, *shared_gate;  // shared_gate: [1][hidden], what weighs that MLP by a sigmoid; null: nothing
    const Packed *const *experts_gate_up, *const *experts_down;
    const float* router_bias;                                       // null: none
    const float *const *experts_gate_up_bias, *const *experts_down_bias;  // null: none
    const float* correction;  // [experts], of the choice; null: none
};

struct DecoderShape {
    int64_t layers, hidden, heads, kv_heads, dim, turned, inner, vocab;  // turned: dimensions that are rotated; inner: at most
    float eps, scale;
    const bf16* embedding;  // null: `embedded` has it
    const float* norm;
    const Packed* output;
    int64_t rank;  // among those that share its layers: each has a team of its own
    Routing routing;         // experts: 0 if no layer has any
    int64_t experts_inner;
    int64_t clamped;  // the activation is that of gpt-oss, else SiLU
    const Packed* embedded;
};

struct DecoderBatch {
    const int64_t *tokens, *positions, *write_index;
    const int32_t *query_start, *kv_length, *page_table;
    int64_t count, rows, max_pages, page_size, page_stride, layer_stride, value_offset;
    int64_t int8;  // whether the cache is in int8; its strides then are in bytes
    char* cache;
    float* hidden;  // [count][hidden], the result
    const int64_t* tapped;  // ascending: the residual stream before these layers is kept too; after the last one: `layers`
    int64_t taps;
    float* kept;  // [count][taps][hidden]
    const Lora* lora;
    void (*overlap)();  // done by the caller's thread when the others have begun; may be null
    const bf16* inputs;  // [count][hidden], what the first layer reads; null: the tokens' rows of the embedding
    char* shared;        // where the ranks that share the layers add up (ranks.h); null: there is one
    int64_t ranks, slot_bytes;
    int (*check)();  // whether all ranks are still there
};

// 1 / sqrt(mean(x^2) + eps), n a multiple of 16; each 16 are `next` floats after those before.
inline float inverse_rms(const float* x, int64_t n, float eps, int64_t next = LANES) {
    Vec squares = {};
    for (int64_t d = 0; d < n; d += LANES, x += next) squares += load(x) * load(x);
    return 1.0f / __builtin_sqrtf(sum(squares) / n + eps);
}

inline Vec silu_times(Vec g, Vec up) {  // through exp(-|g|), which cannot overflow
    const Vec e = exp_negative(select(g < 0.0f, g, -g));
    return g * select(g < 0.0f, e, splat(1.0f)) / (e + 1.0f) * up;
}

inline Vec clamped_times(Vec g, Vec up) {  // see `reference.swiglu_clamped`
    constexpr float LIMIT = 7.0f, ALPHA = 1.702f;
    g = select(g > LIMIT, splat(LIMIT), g);
    up = select(up > LIMIT, splat(LIMIT), select(up < -LIMIT, splat(-LIMIT), up));
    const Vec z = g * ALPHA, e = exp_negative(select(z < 0.0f, z, -z));
    return g * select(z < 0.0f, e, splat(1.0f)) / (e + 1.0f) * (up + 1.0f);
}

}  // namespace
