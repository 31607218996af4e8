// Rows that enter products, of what is rounded to bfloat16, and the sums that leave them.
#pragma once
#include <vector>

#include "instructions.h"
#include "packed.h"

namespace {

template <typename Element>
Element* aligned(std::vector<Element>& kept, int64_t size) {
    if (int64_t(kept.size()) < size + 32) kept.resize(size + 32);
    return (Element*)((uintptr_t(kept.data()) + 63) & ~uintptr_t(63));
}

// Rows as tiles of 16 rows x 32 inputs; where floats are multiplied, the same rounded values as floats beside them.
struct Rows {
    bf16* tiles = nullptr;
    float* floats = nullptr;
    int64_t blocks = 0;

    struct Memory {
        std::vector<bf16> tiles;
        std::vector<float> floats;
    };

    Rows() = default;
    // Zeros: so is what lies beyond the width of a row.
    Rows(Memory& memory, int64_t rows, int64_t width) : blocks((width + 31) / 32) {
        const int64_t size = (rows + 15) / 16 * blocks * TILE;
        memory.tiles.clear(), memory.floats.clear();
        tiles = aligned(memory.tiles, size);
        if (instructions() == FLOATS) floats = aligned(memory.floats, size);
    }

    bf16* at(int64_t row, int64_t block) const { return tiles + place(row, block); }
    const bf16* operand(int64_t row, int64_t block, bf16) const { return tiles + place(row, block); }
    const float* operand(int64_t row, int64_t block, float) const { return floats + place(row, block); }

    // 16 inputs of a row, from `input` on.
    void put(int64_t row, int64_t input, __m512 x) const { put(row, input, rounded(x)); }
    void put(int64_t row, int64_t input, __m256i x) const {
        const int64_t to = place(row, input / 32) + input % 32;
        _mm256_storeu_si256((__m256i*)(tiles + to), x);
        if (floats) _mm512_storeu_ps(floats + to, widened(x));
    }

   private:
    int64_t place(int64_t row, int64_t block) const { return (row / 16 * blocks + block) * TILE + row % 16 * 32; }
};

// Float32 sums as tiles of 16 rows x 16 outputs: a product's go where they belong in one piece. (Row after row they
// would go to as many lines as there are rows, often of one set of the cache, and take a quarter of a small step.)
struct Sums {
    float* tiles;
    int64_t wide;  // tiles side by side

    // The 16 outputs from `output` on, a multiple of 16, of one row; the next 16 are NEXT floats further.
    static constexpr int64_t NEXT = 16 * 16;
    float* at(int64_t row, int64_t output) const {
        return tiles + ((row / 16 * wide + output / 16) * 16 + row % 16) * 16;
    }
};

// Of a panel's product with a group, the tiles: two for the first 16 rows, two for the rest.
struct Quarters {
    float* tile[4];

    explicit Quarters(float* c) : tile{c, c + Sums::NEXT, c + 2 * Sums::NEXT, c + 3 * Sums::NEXT} {}
    Quarters(const Sums& y, int64_t row, const Packed& w, int64_t g)
        : tile{y.at(row, w.column(g, 0)), y.at(row, w.column(g, 1)), y.at(row + 16, w.column(g, 0)),
               y.at(row + 16, w.column(g, 1))} {}
    // 16 outputs of a row of the panel.
    float* at(int64_t row, int64_t half) const { return tile[row / 16 * 2 + half] + row % 16 * 16; }
    void expect(int64_t rows) const {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t half = 0; half < 2; half++) __builtin_prefetch(at(i, half), 1);
    }
};

}  // namespace
