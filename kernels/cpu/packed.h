// Weights of linear layers, packed once: as bfloat16, or in few bits with a scale for each output.
//
// A weight [n, k] is cut into groups of 32 outputs, and those into blocks of 32 inputs: two tiles that lie one after the
// other in the order in which a product reads them. A tile of bfloat16 is what AMX calls the second operand: [16 pairs of
// inputs][16 outputs][2]. One of int8 has the same order, but that of two lines of 32 each 8 elements of one come before 8 of
// the other: so they are when bytes are spread to words (widened.h). Of int4 a word holds one element each of four lines. Before
// a block's tiles are its steps then, of each tile's first 16 inputs and of the next. A group's scales follow its blocks.
// Of GGUF's formats a block's scales come first, float16 for each of 32 outputs, and its least values; then words of an output
// with 4 inputs of 8 bits or 8 of 4 bits, in the order of the inputs. These are never packed for float16.
// So the rest lie for all instructions but those that multiply float16: a block is [32 inputs][32 outputs] for them, bfloat16 has
// become float16, with scales too, and a word of int4 holds four inputs of an output.
#pragma once
#include <sys/mman.h>

#include <cmath>
#include <memory>
#include <mutex>
#include <tuple>

#include "instructions.h"

namespace {

constexpr int64_t TILE = 16 * 32;     // elements of a tile
constexpr int64_t GROUP = 32;         // outputs of a group
constexpr int64_t STEPS = 4 * 16;     // of a block of int4

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

enum Kept { BFLOAT16, INT8, INT4, Q8_0, Q4_0, Q4_1 };

// A block of GGUF's formats: how many bytes its scales take, and what they and the elements take together.
constexpr bool of_gguf(Kept kept) { return kept >= Q8_0; }
constexpr int64_t scale_bytes(Kept kept) { return (kept == Q4_1 ? 2 : 1) * GROUP * 2; }
constexpr int64_t gguf_bytes(Kept kept) { return scale_bytes(kept) + (kept == Q8_0 ? 2 : 1) * TILE; }

// paired: the outputs are two halves (gate and up) and a group is 16 of each, so that they meet in a register.
struct Packed {
    int64_t n, k, groups, blocks;  // blocks of 32 inputs
    bool paired;
    Kept kept;
    bool halves;  // float16 are multiplied
    char* memory;
    std::shared_ptr<Slab> slab;

    bool scaled() const { return kept == INT8 || kept == INT4 || halves; }
    int64_t block_bytes() const {
        if (of_gguf(kept)) return gguf_bytes(kept);
        return kept == BFLOAT16 ? 4 * TILE : kept == INT8 ? 2 * TILE : STEPS + TILE;
    }
    int64_t tile_bytes() const { return blocks * block_bytes(); }
    int64_t group_bytes() const { return tile_bytes() + (scaled() ? GROUP * int64_t(sizeof(float)) : 0); }
    char* group(int64_t g) const { return memory + g * group_bytes(); }
    float* scales(int64_t g) const { return (float*)(group(g) + tile_bytes()); }
    // The first output of one of a group's two tiles, and how many of its 16 are outputs at all.
    int64_t column(int64_t g, int64_t half) const { return paired ? half * (n / 2) + g * 16 : g * GROUP + half * 16; }
    int64_t width(int64_t g, int64_t half) const {
        const int64_t end = paired ? (half + 1) * (n / 2) : n;
        return std::max<int64_t>(0, std::min<int64_t>(16, end - column(g, half)));
    }
};

// An element of a block, by its place among those of 16 bits.
inline bf16& brain_at(char* block, int64_t at) { return ((bf16*)block)[at]; }
inline half& half_at(char* block, int64_t at) { return ((half*)block)[at]; }
inline int8_t& eight_at(char* block, int64_t at, bool halves) {
    return ((int8_t*)block)[halves ? at : at / 64 * 64 + at % 32 / 8 * 16 + at / 32 % 2 * 8 + at % 8];
}
struct Nibble {
    uint8_t &step, &byte;
    int shift;

    Nibble(char* block, int64_t at, bool halves)
        : step(((uint8_t*)block)[halves ? at / TILE * GROUP + at % GROUP : at / 256 * 16 + at % 32 / 2]),
          byte(((uint8_t*)block)[STEPS + at / 128 * 64 + at % 32 * 2 + at / 64 % 2]), shift(at / 32 % 2 * 4) {}

    float value() const {
        const uint32_t bits = uint32_t(step >> 7) << 31 | ((step & 127u) + (120u << 4)) << 19;
        float size;
        std::memcpy(&size, &bits, sizeof size);
        return float(((byte >> shift & 15) ^ 8) - 8) * size;
    }
};

// The same of GGUF's formats, by output and input. What they mean is rounded once, from float32.
struct GgufElement {
    Kept kept;
    char* block;
    int64_t output, input;

    half& scale() const { return ((half*)block)[output]; }
    half& least() const { return ((half*)block)[GROUP + output]; }  // of Q4_1
    uint8_t& byte() const {
        const int64_t each = kept == Q8_0 ? 4 : 8, line = output / 16 * (32 / each) + input / each;
        return ((uint8_t*)block)[scale_bytes(kept) + line * 64 + output % 16 * 4 + input % each * 4 / each];
    }
    int shift() const { return int(input % 2 * 4); }  // of four bits

    // From a block as the file has it: its scale, its least value, 32 bytes or 16 of which each has two inputs 16 apart.
    void set(const uint8_t* from) const {
        std::memcpy(&scale(), from, 2);
        if (kept == Q4_1) std::memcpy(&least(), from + 2, 2);
        const uint8_t* elements = from + (kept == Q4_1 ? 4 : 2);
        if (kept == Q8_0)
            byte() = elements[input];
        else
            byte() |= uint8_t((elements[input % 16] >> input / 16 * 4 & 15) << shift());
    }
    float value() const {
        const float size = widen(scale());
        if (kept == Q8_0) return float(int8_t(byte())) * size;
        const int level = byte() >> shift() & 15;
        return kept == Q4_0 ? float(level - 8) * size : std::fma(float(level), size, widen(least()));
    }
    static int64_t bytes(Kept kept) { return kept == Q8_0 ? 34 : kept == Q4_0 ? 18 : 20; }  // in the file
};

// Calls visit(block, at, output, input, scale) for each element of one group.
template <typename Visit>
void visit_group(const Packed& p, int64_t g, Visit visit) {
    for (int64_t block = 0; block < p.blocks; block++)
        for (int64_t half = 0; half < 2; half++) {
            const int64_t column = p.column(g, half), width = p.width(g, half);
            for (int64_t i = 0; i < 32 && block * 32 + i < p.k; i++)
                for (int64_t j = 0; j < width; j++) {
                    const int64_t output = half * 16 + j, in_tiles = half * TILE + i / 2 * 32 + j * 2 + i % 2;
                    visit(p.group(g) + block * p.block_bytes(), p.halves ? i * GROUP + output : in_tiles, column + j,
                          block * 32 + i, output);
                }
        }
}

// A weight [n, k] as engine/quantization has it: bf16, int8, nibbles with `steps`, or a file's blocks; scales [n] (int8, int4).
struct Weight {
    Kept kept;
    const void* elements;
    const uint8_t* steps;
    const float* scales;
    int64_t n, k;

    // Bfloat16 of one output over its scale, a power of two, are below 2^10, so that 32 of them times inputs below 1 have a sum
    // in float16; what is 2^24 times smaller than the largest loses bits.
    float half_scale(int64_t output) const {
        const bf16* row = (const bf16*)elements + output * k;
        int exponent = 0;
        for (int64_t i = 0; i < k; i++) exponent = std::max(exponent, row[i].bits >> 7 & 255);
        return std::ldexp(1.0f, std::max(exponent - 126 - 10, -126));
    }
};

// The elements of one group in bfloat16, two inputs at a time; there are an even number of them.
inline void copy_pairs(const Packed& p, int64_t g, const bf16* elements) {
    for (int64_t block = 0; block < p.blocks; block++)
        for (int64_t half = 0; half < 2; half++) {
            uint32_t* tile = (uint32_t*)(p.group(g) + block * p.block_bytes()) + half * TILE / 2;
            const int64_t pairs = std::min<int64_t>(16, (p.k - block * 32) / 2);
            for (int64_t j = 0; j < p.width(g, half); j++) {
                const bf16* row = elements + (p.column(g, half) + j) * p.k + block * 32;
                for (int64_t pair = 0; pair < pairs; pair++) std::memcpy(tile + pair * 16 + j, row + 2 * pair, 4);
            }
        }
}

// null: no memory.
inline Packed* pack(const Weight& w, bool paired) {
    const int64_t outputs = paired ? w.n / 2 : w.n, per_group = paired ? 16 : GROUP, groups = (w.k + 15) / 16;
    Packed* p = new Packed{w.n, w.k, (outputs + per_group - 1) / per_group, (w.k + 31) / 32, paired, w.kept,
                           instructions() == HALVES && !of_gguf(w.kept), nullptr, nullptr};
    std::tie(p->memory, p->slab) = Slab::take(p->groups * p->group_bytes());
    if (!p->memory) {
        delete p;
        return nullptr;
    }
#pragma omp parallel for
    for (int64_t g = 0; g < p->groups; g++) {
        for (int64_t i = 0; i < GROUP && p->scaled(); i++)
            if (i % 16 < p->width(g, i / 16)) {
                const int64_t output = p->column(g, i / 16) + i % 16;
                p->scales(g)[i] = w.kept == BFLOAT16 ? w.half_scale(output) : w.scales[output];
            }
        if (w.kept == BFLOAT16 && !p->halves && w.k % 2 == 0) {
            copy_pairs(*p, g, (const bf16*)w.elements);
            continue;
        }
        visit_group(*p, g, [&](char* block, int64_t at, int64_t output, int64_t input, int64_t place) {
            if (of_gguf(w.kept)) {
                const int64_t in_file = (output * p->blocks + input / 32) * GgufElement::bytes(w.kept);
                GgufElement{w.kept, block, place, input % 32}.set((const uint8_t*)w.elements + in_file);
            } else if (w.kept == BFLOAT16 && p->halves) {
                const float x = widen(((const bf16*)w.elements)[output * w.k + input]);
                half_at(block, at) = narrow<half>(x / p->scales(g)[place]);
            } else if (w.kept == BFLOAT16) {
                brain_at(block, at) = ((const bf16*)w.elements)[output * w.k + input];
            } else if (w.kept == INT8) {
                eight_at(block, at, p->halves) = ((const int8_t*)w.elements)[output * w.k + input];
            } else {
                const uint8_t both = ((const uint8_t*)w.elements)[output * groups * 8 + input / 2];
                Nibble nibble(block, at, p->halves);
                nibble.byte |= uint8_t((both >> input % 2 * 4 & 15) << nibble.shift);
                nibble.step = w.steps[output * groups + input / 16];
            }
        });
    }
    return p;
}

// The weight [n, k] again, rounded to bfloat16 where it was quantized.
inline void plain(const Packed& p, bf16* weight) {
    for (int64_t g = 0; g < p.groups; g++)
        visit_group(p, g, [&](char* block, int64_t at, int64_t output, int64_t input, int64_t place) {
            auto element = [&]() -> float {
                switch (p.kept) {
                    case BFLOAT16: return p.halves ? widen(half_at(block, at)) : widen(brain_at(block, at));
                    case INT8: return eight_at(block, at, p.halves);
                    case INT4: return Nibble(block, at, p.halves).value();
                    default: return GgufElement{p.kept, block, place, input % 32}.value();
                }
            };
            weight[output * p.k + input] = narrow<bf16>(element() * (p.scaled() ? p.scales(g)[place] : 1.0f));
        });
}

}  // namespace
