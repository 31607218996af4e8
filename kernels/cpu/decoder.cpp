// The fused decoder behind a C interface; empty where vectors cannot convert float16, and where there are no teams.
#include "system.h"
#if (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) || defined(__aarch64__)) && defined(TEAM_SYSTEM)
#include <algorithm>
#include <vector>

#include "decoder.h"

namespace {

// y = x W^T + bias, of some rows; `end`: of its items, among those of the products before it.
struct Linear {
    const Packed* w = nullptr;
    Rows::Memory memory;
    Rows x;
    int64_t rows = 0, end = 0;
    const float* bias = nullptr;
    bf16* y = nullptr;

    void enter(const Packed& weight, const bf16* given, int64_t stride, int64_t count, const float* added, bf16* to) {
        w = &weight, x = Rows(memory, count, weight.k, {weight.kept}), rows = count, bias = added, y = to;
        for (int64_t row = 0; row < rows; row++)
            for (int64_t d = 0; d < x.blocks * 32; d += LANES) {
                bf16 some[LANES] = {};
                std::memcpy(some, given + row * stride + d, std::clamp<int64_t>(w->k - d, 0, LANES) * sizeof(bf16));
                x.put(row, d, load(some));
            }
    }

    void multiply(int64_t item) const {
        alignas(64) float sums[PANEL * GROUP];
        Nothing more;
        auto place = [&](int64_t, int64_t, int64_t) { return Quarters(sums); };
        auto take = [&](int64_t row, int64_t count, int64_t g, const Quarters& sums) {
            for (int64_t half = 0; half < 2; half++)
                for (int64_t i = 0; i < count; i++)
                    for (int64_t j = 0; j < w->width(g, half); j++) {
                        const int64_t column = w->column(g, half) + j;
                        y[(row + i) * w->n + column] = narrow<bf16>(sums.at(i, half)[j]);
                    }
        };
        multiply_item(x, rows, *w, item, bias, more, place, take);
    }
};

void run(std::vector<Linear>& linears, int threads) {
    int64_t items = 0;
    for (Linear& linear : linears) linear.end = items += items_of(*linear.w, linear.rows);
    Team::of(threads).run({items}, [](void* context, int, int64_t item, int) {
        const std::vector<Linear>& all = *(const std::vector<Linear>*)context;
        const auto linear = std::upper_bound(all.begin(), all.end(), item,
                                             [](int64_t item, const Linear& one) { return item < one.end; });
        linear->multiply(item - (linear->end - items_of(*linear->w, linear->rows)));
    }, &linears);
}

}  // namespace

extern "C" {

int personae_has_decoder() { return 1; }

// Which Instructions multiply, after `wanted` (0 to 3) are set where they are there.
int personae_instructions(int wanted) {
    if (wanted >= FLOATS && wanted <= HALVES && there_are(Instructions(wanted))) instructions() = Instructions(wanted);
    return instructions();
}

// A weight as it is kept (formats.h), packed in `memory`, or in memory of its own if that is null. elements null: it lies there
// packed already. The result is null if there is no memory.
void* personae_pack(int kept, const void* elements, const void* steps, const float* scales, int64_t n, int64_t k,
                    int paired, void* memory) {
    return pack({Kept(kept), elements, (const uint8_t*)steps, scales, n, k}, paired, (char*)memory);
}
int64_t personae_packed_bytes(int kept, int64_t n, int64_t k, int paired) {
    return unplaced(Kept(kept), n, k, paired).bytes();
}
void personae_plain(const void* packed, void* weight) { plain(*(const Packed*)packed, (bf16*)weight); }
// Rows of a weight in few bits, [count, k] bfloat16: those of `outputs`.
void personae_rows(const void* packed, const int64_t* outputs, int64_t count, void* rows) {
    const Packed& p = *(const Packed*)packed;
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) plain_row(p, outputs[i], (bf16*)rows + i * p.k);
}
void personae_unpack(void* packed) { delete (Packed*)packed; }

// y [rows, n] = x [rows, k] W^T + bias, all bfloat16 but the bias, which is readable for 32 floats past its end.
void personae_linear(const void* packed, const void* x, int64_t x_stride, int64_t rows, const float* bias, void* y,
                     int threads) {
    std::vector<Linear> linears(1);
    linears[0].enter(*(const Packed*)packed, (const bf16*)x, x_stride, rows, bias, (bf16*)y);
    run(linears, threads);
}

// The same with several weights of one shape: the first rows[0] rows of x and y are the first one's, and so on.
void personae_grouped(const void* const* packed, const int64_t* rows, int64_t weights, const void* x, int64_t x_stride,
                      void* y, int threads) {
    std::vector<Linear> linears(weights);
    int64_t row = 0, entered = 0;
    for (int64_t i = 0; i < weights; i++) {
        if (!rows[i]) continue;
        const Packed& w = *(const Packed*)packed[i];
        linears[entered++].enter(w, (const bf16*)x + row * x_stride, x_stride, rows[i], nullptr, (bf16*)y + row * w.n);
        row += rows[i];
    }
    linears.resize(entered);
    run(linears, threads);
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
