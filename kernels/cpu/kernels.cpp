// The operators for the CPU, behind a C interface; kernels/reference.py says what each of them computes.
//
// Vectors are 16 floats (vector.h): one AVX-512 register, or several narrower ones elsewhere.
// Every sum runs in an order that depends on the row alone (16 keys at a time, from the first on), never on its
// neighbours in the batch or on the number of threads: a row's result is the same bits alone or in company.
#include "attention.h"
#include "latent.h"
#include "pointwise.h"
#include "sampling.h"
#include "sgmv.h"

#define DISPATCH(CALL_FLOAT, CALL_BF16) \
    if (type == 0)                      \
        CALL_FLOAT;                     \
    else                                \
        CALL_BF16;

extern "C" {

void personae_paged_attention(int type, const Attention* a) {
    DISPATCH(paged_attention<float>(*a), paged_attention<bf16>(*a))
}

void personae_latent_attention(int type, const LatentAttention* a) {
    DISPATCH(latent_attention<float>(*a), latent_attention<bf16>(*a))
}

void personae_append_kv(int type, const void* k, const void* v, void* kc, void* vc, const int64_t* index,
                        int64_t tokens, int64_t heads, int64_t dim, int64_t page_size, int64_t k_stride,
                        int64_t v_stride, int64_t page_stride) {
    DISPATCH(append_kv((const float*)k, (const float*)v, (float*)kc, (float*)vc, index, tokens, heads, dim, page_size,
                       k_stride, v_stride, page_stride),
             append_kv((const bf16*)k, (const bf16*)v, (bf16*)kc, (bf16*)vc, index, tokens, heads, dim, page_size,
                       k_stride, v_stride, page_stride))
}

void personae_append_kv_int8(int type, const void* k, const void* v, void* kc, void* vc, const int64_t* index,
                             int64_t tokens, int64_t heads, int64_t dim, int64_t page_size, int64_t k_stride,
                             int64_t v_stride, int64_t page_stride) {
    DISPATCH(append_kv_int8((const float*)k, (const float*)v, (char*)kc, (char*)vc, index, tokens, heads, dim,
                            page_size, k_stride, v_stride, page_stride),
             append_kv_int8((const bf16*)k, (const bf16*)v, (char*)kc, (char*)vc, index, tokens, heads, dim,
                            page_size, k_stride, v_stride, page_stride))
}

void personae_sgmv(int type, const Sgmv* s) { DISPATCH(sgmv<float>(*s), sgmv<bf16>(*s)) }

void personae_rms_norm(int type, const void* x, const void* residual, const float* weight, void* y, void* total,
                       int64_t outer, int64_t inner, int64_t n, int64_t outer_stride, int64_t inner_stride,
                       float eps) {
    DISPATCH(rms_norm((const float*)x, (const float*)residual, weight, (float*)y, (float*)total, outer,
                      inner, n, outer_stride, inner_stride, eps),
             rms_norm((const bf16*)x, (const bf16*)residual, weight, (bf16*)y, (bf16*)total, outer,
                      inner, n, outer_stride, inner_stride, eps))
}

void personae_rotary(int type, void* x, const int64_t* positions, const float* cos, const float* sin, int64_t tokens,
                     int64_t heads, int64_t dim, int64_t stride, int64_t head_stride) {
    DISPATCH(rotary((float*)x, positions, cos, sin, tokens, heads, dim, stride, head_stride),
             rotary((bf16*)x, positions, cos, sin, tokens, heads, dim, stride, head_stride))
}

void personae_silu_and_mul(int type, const void* x, void* y, int64_t tokens, int64_t inner, int64_t stride) {
    DISPATCH(act_and_mul<false>((const float*)x, (float*)y, tokens, inner, stride),
             act_and_mul<false>((const bf16*)x, (bf16*)y, tokens, inner, stride))
}

void personae_gelu_and_mul(int type, const void* x, void* y, int64_t tokens, int64_t inner, int64_t stride) {
    DISPATCH(act_and_mul<true>((const float*)x, (float*)y, tokens, inner, stride),
             act_and_mul<true>((const bf16*)x, (bf16*)y, tokens, inner, stride))
}

void personae_choose(const float* logits, const void* bitmask, int64_t rows, int64_t vocab, int64_t stride,
                     int64_t word_stride, const Choice* choice, int64_t* tokens, float* best, int threads) {
    choose(logits, (const int32_t*)bitmask, rows, vocab, stride, word_stride, *choice, tokens, best, threads);
}

// The system gives memory to all of this, as for a write. No byte changes, whatever other threads write meanwhile.
void personae_touch(char* memory, int64_t bytes, int64_t system_page) {
    for (int64_t i = 0; i < bytes; i += system_page) {
        char nothing = 0;  // an exchange, since compilers make a load of an addition of nothing
        __atomic_compare_exchange_n(memory + i, &nothing, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    }
}
}
