// Rows that enter products, of what is rounded to bfloat16, to float16 or to bytes, and the sums that leave them.
#pragma once
#include <vector>

#include "instructions.h"
#include "packed.h"

namespace {

template <typename Element>
Element* aligned(std::vector<Element>& kept, int64_t size) {
    if (int64_t(kept.size()) < size + 64) kept.resize(size + 64);
    return (Element*)((uintptr_t(kept.data()) + 63) & ~uintptr_t(63));
}

// 16 rows of halves, 32 inputs each, and what each row of them has to be multiplied by.
struct HalfTile {
    const half* x;
    const float* sizes;
};

// Rows as whole numbers: x = scale * number, where 32 inputs share a scale, as `reference.round_inputs` says. Sixteen rows lie
// together: their numbers of a block, row after row; and so what a block has of each other kind.
struct WholeRows {
    int8_t* numbers = nullptr;
    float* scales = nullptr;   // of each 32
    float* totals = nullptr;   // scale times the sum of each 32
    int32_t* less = nullptr;   // the negative sums of each 32 numbers, of the first 16 and of the others
    int64_t blocks = 0;

    int64_t place(int64_t row, int64_t block) const { return (row / 16 * blocks + block) * 16 + row % 16; }
    // Of 32, of the first 16 or of the others: which of the three.
    int64_t place_less(int64_t row, int64_t block, int64_t which) const {
        return ((row / 16 * blocks + block) * 3 + which) * 16 + row % 16;
    }
    // The rows from `row` on, as `Rows::from`.
    WholeRows from(int64_t row) const {
        const int64_t at = place(row, 0);
        return {numbers + at * 32, scales + at, totals + at, less + place_less(row, 0, 0), blocks};
    }
    void copy(int64_t row, const WholeRows& other, int64_t of) const {
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t to = place(row, block), at = other.place(of, block);
            std::memcpy(numbers + to * 32, other.numbers + at * 32, 32);
            scales[to] = other.scales[at], totals[to] = other.totals[at];
            for (int64_t which = 0; which < 3; which++)
                less[place_less(row, block, which)] = other.less[other.place_less(of, block, which)];
        }
    }

    // A block's largest input becomes 127. Where it is below 2^-100, all are 0; where it is not finite, so is the scale.
    void put(int64_t row, int64_t block, Vec first, Vec second) const {
        const IVec a = (IVec)first & 0x7fffffff, b = (IVec)second & 0x7fffffff;
        const IVec larger = (IVec)select(a > b, (Vec)a, (Vec)b);
        const int32_t bits = largest(larger);
        float most;
        std::memcpy(&most, &bits, sizeof most);
        if (most < 0x1p-100f) most = 0;
        const Vec inverse = splat(most == 0 ? 0.0f : 127.0f / most);
        const IVec low = nearest(first * inverse), high = nearest(second * inverse);
        const int64_t at = place(row, block);
        store_bytes(numbers + at * 32, low);
        store_bytes(numbers + at * 32 + 16, high);
        scales[at] = most / 127.0f;
        const int32_t of_low = sum(low), of_high = sum(high);
        less[place_less(row, block, 0)] = -of_low - of_high;
        less[place_less(row, block, 1)] = -of_low;
        less[place_less(row, block, 2)] = -of_high;
        totals[at] = scales[at] * float(of_low + of_high);
    }
};

// Rows as tiles of 16 rows x 32 inputs. Where floats are multiplied, the same rounded values as floats beside them. Where halves
// are, what was rounded to them, below 1 in size: each block of 32 inputs of a row has a power of two of its own. Where weights
// have few bits, what was rounded to bfloat16 as whole numbers.
struct Rows {
    bf16* tiles = nullptr;
    float* floats = nullptr;
    half* halves = nullptr;
    float* sizes = nullptr;
    WholeRows whole;
    int64_t blocks = 0;

    struct Memory {
        std::vector<bf16> tiles;
        std::vector<float> floats, sizes, scales, totals;
        std::vector<half> halves;
        std::vector<int8_t> numbers;
        std::vector<int32_t> less;
    };

    Rows() = default;
    // For products with `weights`. Zeros: so is what lies beyond the width of a row.
    Rows(Memory& memory, int64_t rows, int64_t width, const std::vector<Kept>& weights) : blocks((width + 31) / 32) {
        const int64_t tall = (rows + 15) / 16 * 16, size = tall * blocks * 32;
        bool brains = false, few = false;
        for (Kept kept : weights) (kept == BFLOAT16 ? brains : few) = true;
        memory = Memory();
        tiles = aligned(memory.tiles, size);
        if (brains && instructions() == FLOATS) floats = aligned(memory.floats, size);
        if (brains && instructions() == HALVES) halves = aligned(memory.halves, size), sizes = aligned(memory.sizes, size / 32);
        if (few)
            whole = {aligned(memory.numbers, size), aligned(memory.scales, size / 32), aligned(memory.totals, size / 32),
                     aligned(memory.less, size / 32 * 3), blocks};
    }

    // The rows from `row` on, of which there are no more than its sixteen has, if it is no multiple of 16.
    Rows from(int64_t row) const {
        const int64_t at = place(row, 0);
        Rows found = *this;
        found.tiles += at;
        if (floats) found.floats += at;
        if (halves) found.halves += at, found.sizes += at / 32;
        if (whole.numbers) found.whole = whole.from(row);
        return found;
    }
    // The same memory for rows that are not as wide.
    Rows of_width(int64_t width) const {
        Rows found = *this;
        found.blocks = found.whole.blocks = (width + 31) / 32;
        return found;
    }
    void copy(int64_t row, const Rows& other, int64_t of) const {
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t to = place(row, block), at = other.place(of, block);
            std::memcpy(tiles + to, other.tiles + at, 32 * sizeof(bf16));
            if (floats) std::memcpy(floats + to, other.floats + at, 32 * sizeof(float));
            if (halves) std::memcpy(halves + to, other.halves + at, 32 * sizeof(half)), sizes[to / 32] = other.sizes[at / 32];
        }
        if (whole.numbers) whole.copy(row, other.whole, of);
    }

    bf16* at(int64_t row, int64_t block) const { return tiles + place(row, block); }
    const bf16* operand(int64_t row, int64_t block, bf16) const { return tiles + place(row, block); }
    const float* operand(int64_t row, int64_t block, float) const { return floats + place(row, block); }
    HalfTile operand(int64_t row, int64_t block, half) const {
        return {halves + place(row, block), sizes + place(row, block) / 32};
    }

    // 16 inputs of a row, from `input` on. Those of an even place among sixteens come before the next, of one thread.
    ALWAYS_INLINE void put(int64_t row, int64_t input, Vec x) const {
        const int64_t to = place(row, input / 32) + input % 32;
        ::put(tiles + to, x);
        if (floats) store(floats + to, round_to_bf16(x));
        if (halves && input % 32 == 0) store((float*)(halves + to), x);  // in the room of what the 32 will be
        if (halves && input % 32 != 0) put_halves(to - 16, load((const float*)(halves + to - 16)), x);
        if (whole.numbers && input % 32 != 0) whole.put(row, input / 32, load(tiles + to - 16), load(tiles + to));
    }

   private:
    int64_t place(int64_t row, int64_t block) const { return (row / 16 * blocks + block) * TILE + row % 16 * 32; }

#if defined(WIDE_REGISTERS)
    // A block's exponent is that of its largest input: 2^126 / 2^exponent takes that below 1, without overflow.
    void put_halves(int64_t to, Vec x, Vec y) const {
        const __m512 first = (__m512)x, second = (__m512)y;
        const __m512i magnitudes = _mm512_max_epu32(_mm512_castps_si512(_mm512_abs_ps(first)),
                                                    _mm512_castps_si512(_mm512_abs_ps(second)));
        const uint32_t exponent = std::min(_mm512_reduce_max_epu32(magnitudes) >> 23, 252u);
        const __m512 scale = _mm512_castsi512_ps(_mm512_set1_epi32(int(253 - exponent) << 23));
        auto keep = [&](half* place, __m512 x) {
            _mm256_storeu_si256((__m256i*)place, _mm512_cvtps_ph(_mm512_mul_ps(x, scale), _MM_FROUND_TO_NEAREST_INT));
        };
        keep(halves + to, first);
        keep(halves + to + 16, second);
        const uint32_t size = (exponent + 1) << 23;
        std::memcpy(sizes + to / 32, &size, sizeof size);
    }
#else
    void put_halves(int64_t, Vec, Vec) const {}
#endif
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
    Sums from(int64_t row) const { return {at(row, 0), wide}; }  // as `Rows::from`
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
