// Products of every format with every number of rows, printed as a hash for each format: test_sets.py compares sets of instructions.
// With an argument: of few bits by AMX.
#include <cstdio>
#include <cstdlib>

#include "../../kernels/cpu/product.h"
#include "../../kernels/cpu/team.h"

int main(int arguments, char**) {
    const bool tiles = arguments > 1;
    const FlushToZero flushing;
    constexpr int64_t n = 80, k = 768, rows = 37;
    uint64_t state = 1;
    auto random = [&] { return uint32_t((state = state * 6364136223846793005u + 1442695040888963407u) >> 33); };
    if (tiles && !there_are(TILES)) return std::printf("no AMX\n"), 1;
    for (int kept = BFLOAT16; kept < FORMATS; kept++) {
        instructions() = tiles && kept != BFLOAT16 ? TILES : FLOATS;
        const Layout l = layout_of(Kept(kept));
        const int64_t blocks = l.file_bytes ? n * k / l.file_inputs : 0;
        std::vector<uint8_t> elements(l.file_bytes ? blocks * l.file_bytes : n * k * 2), steps(n * k / 16);
        std::vector<float> scales(n);
        for (uint8_t& byte : elements) byte = uint8_t(random());
        for (uint8_t& step : steps) step = uint8_t(random());
        for (float& scale : scales) scale = float(random() % 1000) * 0x1p-10f;
        for (int64_t i = 0; i < n * k && kept == BFLOAT16; i++) ((uint16_t*)elements.data())[i] = uint16_t(0x3f00 | (random() & 0x80ff));
        for (int64_t i = 0; i < blocks; i++)  // scales and least values near 1
            if (kept == MXFP4)
                elements[i * l.file_bytes] = uint8_t(120 + random() % 16);
            else
                for (int64_t at = 0; at < (l.least ? 4 : 2); at += 2)
                    elements[i * l.file_bytes + (kept == Q6_K ? 208 : 0) + at + 1] = uint8_t(0x38 | (random() & 0x81));
        const Packed* w = pack({Kept(kept), elements.data(), steps.data(), scales.data(), n, k}, false, nullptr);
        std::vector<float> inputs(rows * k);
        for (float& x : inputs) x = float(int32_t(random() % 2001) - 1000) * 0x1p-8f;
        auto product = [&](int64_t first, int64_t count) {
            Rows::Memory memory;
            Rows x(memory, count, k, {Kept(kept)});
            for (int64_t row = 0; row < count; row++)
                for (int64_t d = 0; d < k; d += LANES) x.put(row, d, load(&inputs[(first + row) * k + d]));
            std::vector<float> y(count * n);
            alignas(64) float sums[PANEL * GROUP];
            Nothing more;
            auto place = [&](int64_t, int64_t, int64_t) { return Quarters(sums); };
            auto take = [&](int64_t row, int64_t some, int64_t g, const Quarters& c) {
                for (int64_t half = 0; half < 2; half++)
                    for (int64_t i = 0; i < some; i++)
                        std::memcpy(&y[(row + i) * n + w->column(g, half)], c.at(i, half), w->width(g, half) * sizeof(float));
            };
            for (int64_t item = 0; item < items_of(*w, count); item++) multiply_item(x, count, *w, item, nullptr, more, place, take);
            return y;
        };
        const std::vector<float> all = product(0, rows);
        for (int64_t count = 1; count < rows; count++) {  // alone and beside others
            const int64_t first = rows - count;
            const std::vector<float> some = product(first, count);
            if (std::memcmp(some.data(), &all[first * n], some.size() * sizeof(float))) return std::printf("%d rows of format %d differ\n", int(count), kept), 1;
        }
        uint64_t hash = 14695981039346656037u;
        for (size_t i = 0; i < all.size() * sizeof(float); i++) hash = (hash ^ ((const uint8_t*)all.data())[i]) * 1099511628211u;
        std::printf("%d %016llx\n", kept, (unsigned long long)hash);
    }
}
