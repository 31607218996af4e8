// Steps of a small decoder in the formats that it can have, printed as a hash for each: test_sets.py compares sets of instructions.
// A row's results must be the same in a prompt, token by token, and beside other sequences.
#include <array>
#include <cstdio>
#include <cstdlib>

#include "../../kernels/cpu/decoder.h"

namespace {

constexpr int64_t HIDDEN = 64, HEADS = 4, KV_HEADS = 2, DIM = 32, INNER = 96, VOCAB = 96, LAYERS = 2, PAGE = 16, CACHE_PAGES = 8;
constexpr int64_t LENGTH = 21;  // tokens of a sequence

uint64_t state = 1;
uint32_t drawn() { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); }
float number() { return float(int32_t(drawn() % 2001) - 1000) * 0x1p-10f; }

std::vector<bf16> matrix(int64_t n, int64_t k) {
    std::vector<bf16> found(n * k);
    for (bf16& x : found) x = narrow<bf16>(number() * 0.25f);
    return found;
}

Packed* packed(Kept kept, int64_t n, int64_t k, bool paired) {
    if (kept == BFLOAT16) {
        const std::vector<bf16> weight = matrix(n, k);
        return pack({kept, weight.data(), nullptr, nullptr, n, k}, paired, nullptr);
    }
    const Layout l = layout_of(kept);
    std::vector<uint8_t> blocks(n * k / l.file_inputs * l.file_bytes);
    for (uint8_t& byte : blocks) byte = uint8_t(drawn());
    const half scale = narrow<half>(kept == Q8_0 ? 0.002f : 0.03f), least = narrow<half>(-0.2f);
    for (size_t at = 0; at < blocks.size(); at += l.file_bytes) {
        std::memcpy(&blocks[at], &scale, 2);
        if (kept == Q4_1) std::memcpy(&blocks[at + 2], &least, 2);
    }
    return pack({kept, blocks.data(), nullptr, nullptr, n, k}, paired, nullptr);
}

struct Model {
    std::vector<float> ones = std::vector<float>(HIDDEN, 1.0f), cos, sin;
    std::vector<bf16> embedding = matrix(VOCAB, HIDDEN), cache;
    DecoderLayer layers[LAYERS];
    DecoderShape shape;

    explicit Model(Kept kept) {
        for (int64_t i = 0; i < LENGTH * DIM / 2; i++) {
            const float x = number();
            cos.push_back(1.0f - x * x), sin.push_back(x);
        }
        for (DecoderLayer& l : layers) {
            l = {};
            l.qkv = packed(kept, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN, false), l.o = packed(kept, HIDDEN, HEADS * DIM, false);
            l.gate_up = packed(kept, 2 * INNER, HIDDEN, true), l.down = packed(kept, HIDDEN, INNER, false);
            l.attention_norm = l.mlp_norm = ones.data(), l.cos = cos.data(), l.sin = sin.data();
        }
        layers[1].window = 9;
        shape = {LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, DIM, INNER, VOCAB, 1e-5f, 0.17f, embedding.data(), ones.data(),
                 packed(kept, VOCAB, HIDDEN, false)};
        cache.resize(LAYERS * 2 * CACHE_PAGES * KV_HEADS * PAGE * DIM);
    }

    // Chunks of sequences in one step: {sequence, first position, tokens}. Sequence s has the pages 2s and 2s + 1.
    std::vector<float> step(Decoder& decoder, const std::vector<std::array<int64_t, 3>>& chunks) {
        std::vector<int64_t> tokens, positions, write;
        std::vector<int32_t> starts = {0}, lengths, table;
        for (const auto& [sequence, first, count] : chunks) {
            for (int64_t at = first; at < first + count; at++) {
                tokens.push_back((7 * at + 31 * sequence + 3) % VOCAB), positions.push_back(at);
                write.push_back((2 * sequence + at / PAGE) * PAGE + at % PAGE);
            }
            starts.push_back(int32_t(tokens.size())), lengths.push_back(int32_t(first + count));
            table.push_back(int32_t(2 * sequence)), table.push_back(int32_t(2 * sequence + 1));
        }
        const int64_t count = int64_t(tokens.size()), page = KV_HEADS * PAGE * DIM;
        std::vector<float> hidden(count * HIDDEN), logits(count * VOCAB);
        DecoderBatch batch = {};
        batch.tokens = tokens.data(), batch.positions = positions.data(), batch.write_index = write.data();
        batch.query_start = starts.data(), batch.kv_length = lengths.data(), batch.page_table = table.data();
        batch.count = count, batch.rows = int64_t(chunks.size()), batch.max_pages = 2, batch.page_size = PAGE;
        batch.page_stride = page, batch.layer_stride = 2 * CACHE_PAGES * page, batch.value_offset = CACHE_PAGES * page;
        batch.cache = (char*)cache.data(), batch.hidden = hidden.data();
        decoder.forward(batch);
        decoder.logits(hidden.data(), count, nullptr, logits.data());
        return logits;
    }
};

bool same(const std::vector<float>& all, int64_t row, const std::vector<float>& one, int64_t of) {
    return !std::memcmp(&all[row * VOCAB], &one[of * VOCAB], VOCAB * sizeof(float));
}

}  // namespace

int main() {
    const FlushToZero flushing;
    instructions() = FLOATS;
    for (const Kept kept : {BFLOAT16, Q8_0, Q4_0, Q4_1}) {
        Model model(kept);
        Decoder decoder(model.shape, model.layers, 2);
        const std::vector<float> all = model.step(decoder, {{0, 0, LENGTH}, {1, 0, LENGTH}});
        for (int64_t at = 0; at < LENGTH; at++) {  // token by token, beside a prompt
            const std::vector<float> some = model.step(decoder, {{2, at, 1}, {3, 0, LENGTH}, {0, at, 1}});
            if (!same(all, at, some, LENGTH + 1)) return std::printf("token %d of format %d differs\n", int(at), kept), 1;
        }
        double squares = 0;
        for (const float x : all) squares += double(x) * x;
        if (!(squares > 1 && squares < 1e9)) return std::printf("format %d: squares %g\n", kept, squares), 1;
        uint64_t hash = 14695981039346656037u;
        for (size_t i = 0; i < all.size() * sizeof(float); i++) hash = (hash ^ ((const uint8_t*)all.data())[i]) * 1099511628211u;
        std::printf("%d %016llx\n", kept, (unsigned long long)hash);
    }
}
