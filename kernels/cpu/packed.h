// Weights of linear layers, packed once: as bfloat16, or as int8 with a scale for each output.
//
// A weight [n, k] is cut into groups of 32 outputs x 32 inputs, two tiles that lie one after the other in the order in
// which a product reads them. A tile of bfloat16 is what AMX calls the second operand: [16 pairs of inputs][16
// outputs][2]. One of int8 has the same order, but that of two lines of 32 each 8 elements of one come before 8 of the other:
// so they are when bytes are spread to words (widened.h). A group's scales follow its tiles.
// The rows x are cut into tiles of 16 rows x 32 inputs. Both instruction sets read the same layouts.
#pragma once
#include <immintrin.h>
#include <sys/mman.h>

#include <memory>
#include <mutex>
#include <tuple>
#include <type_traits>

#include "vector.h"

namespace {

constexpr int64_t TILE = 16 * 32;     // elements of a tile
constexpr int64_t GROUP = 32;         // outputs of a group

// Memory for weights that live long: slabs on huge pages, so that reading them from end to end misses no address
// translations. A slab is given back when the last weight in it is.
struct Slab {
    static constexpr size_t HUGE = 2 << 20, USUAL = 64 << 20;
    char *memory, *free;
    size_t bytes, left;

    explicit Slab(size_t wanted) : bytes(std::max(USUAL, wanted) + HUGE) {
        void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memory = found == MAP_FAILED ? nullptr : (char*)found;
        free = (char*)((uintptr_t(memory) + HUGE - 1) & ~uintptr_t(HUGE - 1));
        left = memory ? size_t(memory + bytes - free) : 0;
        if (memory) madvise(free, left, MADV_HUGEPAGE);
    }
    ~Slab() {
        if (memory) munmap(memory, bytes);
    }

    // `bytes` of zeros and the slab that they are in; null where there is no memory.
    static std::pair<char*, std::shared_ptr<Slab>> take(size_t bytes) {
        static std::mutex taking;
        static std::weak_ptr<Slab> last;
        std::lock_guard<std::mutex> lock(taking);
        bytes = (bytes + 63) & ~size_t(63);
        std::shared_ptr<Slab> slab = last.lock();
        if (!slab || slab->left < bytes) last = slab = std::make_shared<Slab>(bytes);
        if (slab->left < bytes) return {nullptr, nullptr};
        char* taken = slab->free;
        slab->free += bytes, slab->left -= bytes;
        return {taken, slab};
    }
};

// paired: the outputs are two halves (gate and up) and a group is 16 of each, so that they meet in a register.
// scaled: the elements are int8.
struct Packed {
    int64_t n, k, groups, blocks;  // blocks of 32 inputs
    bool paired, scaled;
    char* memory;
    std::shared_ptr<Slab> slab;

    int64_t tile_bytes() const { return blocks * 2 * TILE * (scaled ? 1 : int64_t(sizeof(bf16))); }
    int64_t group_bytes() const { return tile_bytes() + (scaled ? GROUP * int64_t(sizeof(float)) : 0); }
    // The tiles of a group: bf16, or int8_t where they are scaled.
    template <typename Element>
    Element* group(int64_t g) const { return (Element*)(memory + g * group_bytes()); }
    float* scales(int64_t g) const { return (float*)(memory + g * group_bytes() + tile_bytes()); }
    // The first output of one of a group's two tiles, and how many of its 16 are outputs at all.
    int64_t column(int64_t g, int64_t half) const { return paired ? half * (n / 2) + g * 16 : g * GROUP + half * 16; }
    int64_t width(int64_t g, int64_t half) const {
        const int64_t end = paired ? (half + 1) * (n / 2) : n;
        return std::max<int64_t>(0, std::min<int64_t>(16, end - column(g, half)));
    }
};

// Calls visit(element, output, input, scale) for each element of one group.
template <typename Element, typename Visit>
void visit_group(const Packed& p, int64_t g, Visit visit) {
    auto place = [](int64_t at) {  // in a tile
        if (std::is_same<Element, bf16>::value) return at;
        return at / 64 * 64 + at % 32 / 8 * 16 + at / 32 % 2 * 8 + at % 8;
    };
    for (int64_t block = 0; block < p.blocks; block++)
        for (int64_t half = 0; half < 2; half++) {
            Element* tile = p.group<Element>(g) + (block * 2 + half) * TILE;
            const int64_t column = p.column(g, half), width = p.width(g, half);
            for (int64_t i = 0; i < 32 && block * 32 + i < p.k; i++)
                for (int64_t j = 0; j < width; j++)
                    visit(tile[place(i / 2 * 32 + j * 2 + i % 2)], column + j, block * 32 + i, half * 16 + j);
        }
}

// weight [n, k], of int8 times `scale` [n], or of bfloat16 as it is (null) -> the same packed; null: no memory.
template <typename Element>
Packed* pack(const Element* weight, const float* scale, int64_t n, int64_t k, bool paired) {
    const int64_t outputs = paired ? n / 2 : n, per_group = paired ? 16 : GROUP;
    Packed* p = new Packed{n, k, (outputs + per_group - 1) / per_group, (k + 31) / 32, paired, scale != nullptr,
                           nullptr, nullptr};
    std::tie(p->memory, p->slab) = Slab::take(p->groups * p->group_bytes());
    if (!p->memory) {
        delete p;
        return nullptr;
    }
#pragma omp parallel for
    for (int64_t g = 0; g < p->groups; g++) {
        visit_group<Element>(*p, g, [&](Element& element, int64_t output, int64_t input, int64_t) {
            element = weight[output * k + input];
        });
        for (int64_t half = 0; scale && half < 2; half++)
            std::copy_n(scale + p->column(g, half), p->width(g, half), p->scales(g) + half * 16);
    }
    return p;
}

// The weight [n, k] again, rounded to bfloat16 where it was int8.
inline void plain(const Packed& p, bf16* weight) {
    for (int64_t g = 0; g < p.groups; g++)
        if (p.scaled)
            visit_group<int8_t>(p, g, [&](int8_t element, int64_t output, int64_t input, int64_t place) {
                weight[output * p.k + input] = narrow<bf16>(element * p.scales(g)[place]);
            });
        else
            visit_group<bf16>(p, g, [&](bf16 element, int64_t output, int64_t input, int64_t) {
                weight[output * p.k + input] = element;
            });
}

// Rows as tiles: where the 32 inputs of a block lie, of one row.
struct Rows {
    bf16* tiles;
    int64_t blocks;

    bf16* at(int64_t row, int64_t block) const { return tiles + (row / 16 * blocks + block) * TILE + row % 16 * 32; }
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
