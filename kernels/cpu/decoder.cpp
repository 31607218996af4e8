// The fused decoder behind a C interface; empty where the processor has no AVX-512.
#if defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__linux__)
#include "decoder.h"

extern "C" {

int personae_has_decoder() { return 1; }

// Which Instructions multiply, after `wanted` (0 to 3) are set where they are there.
int personae_instructions(int wanted) {
    if (wanted >= FLOATS && wanted <= HALVES && there_are(Instructions(wanted))) instructions() = Instructions(wanted);
    return instructions();
}

// Whether few bits become bfloat16 through float16; `on` 0 or 1 sets it (where there is float16), else asks.
int personae_half(int on) {
    if (on == 0 || on == 1) half_on() = on && HALVES_BUILT;
    return half_on();
}

// A weight as it is kept (0 to 5), packed; null: no memory.
void* personae_pack(int kept, const void* elements, const void* steps, const float* scales, int64_t n, int64_t k,
                    int paired) {
    return pack({Kept(kept), elements, (const uint8_t*)steps, scales, n, k}, paired);
}
void personae_plain(const void* packed, void* weight) { plain(*(const Packed*)packed, (bf16*)weight); }
void personae_unpack(void* packed) { delete (Packed*)packed; }

// y [rows, n] = x [rows, k] W^T + bias, all bfloat16 but the bias, which is readable for 32 floats past its end.
void personae_linear(const void* packed, const void* x, int64_t x_stride, int64_t rows, const float* bias, void* y,
                     int threads) {
    struct Call {
        const Packed& w;
        Rows x;
        int64_t rows;
        const float* bias;
        bf16* y;
    };
    const Packed& w = *(const Packed*)packed;
    Rows::Memory memory;
    Call call{w, Rows(memory, rows, w.k), rows, bias, (bf16*)y};
    for (int64_t row = 0; row < rows; row++)
        for (int64_t d = 0; d < call.x.blocks * 32; d += LANES) {
            const __mmask16 there = __mmask16((1u << std::clamp<int64_t>(w.k - d, 0, LANES)) - 1);
            call.x.put(row, d, widened(_mm256_maskz_loadu_epi16(there, (const bf16*)x + row * x_stride + d)));
        }
    Team::of(threads).run({items_of(w, rows)}, [](void* context, int, int64_t item, int) {
        const Call& c = *(const Call*)context;
        alignas(64) float sums[PANEL * GROUP];
        Nothing more;
        auto place = [&](int64_t, int64_t, int64_t) { return Quarters(sums); };
        auto take = [&](int64_t row, int64_t count, int64_t g, const Quarters& sums) {
            for (int64_t half = 0; half < 2; half++)
                for (int64_t i = 0; i < count; i++)
                    for (int64_t j = 0; j < c.w.width(g, half); j++) {
                        const int64_t column = c.w.column(g, half) + j;
                        c.y[(row + i) * c.w.n + column] = narrow<bf16>(sums.at(i, half)[j]);
                    }
        };
        multiply_item(c.x, c.rows, c.w, item, c.bias, more, place, take);
    }, &call);
}

void* personae_decoder(const DecoderShape* shape, const DecoderLayer* layers, int threads) {
    return new Decoder(*shape, layers, threads);
}
void personae_decoder_free(void* decoder) { delete (Decoder*)decoder; }
void personae_decoder_forward(void* decoder, const DecoderBatch* batch) { ((Decoder*)decoder)->forward(*batch); }
void personae_decoder_logits(void* decoder, const float* hidden, int64_t count, const void* logit_mask, float* logits) {
    ((Decoder*)decoder)->logits(hidden, count, (const uint32_t*)logit_mask, logits);
}
}
#else
extern "C" int personae_has_decoder() { return 0; }
#endif
