// Weights of linear layers, packed once: as bfloat16, or in few bits (formats.h).
//
// A weight [n, k] is cut into groups of 32 outputs, and those into blocks of 32 inputs: of bfloat16 two tiles that lie one after
// the other in the order in which a product reads them. A tile is what AMX calls the second operand: [16 pairs of
// inputs][16 outputs][2]. That is the same for all instructions but those that multiply float16: a block is [32 inputs][32
// outputs] for them, and bfloat16 has become float16, with a scale for each output. A group's scales follow its blocks.
#pragma once
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "formats.h"
#include "instructions.h"
#include "system.h"

namespace {

constexpr int64_t TILE = 16 * 32;     // elements of a tile

// Memory for weights that live long: slabs on huge pages, so that reading them from end to end misses no address
// translations. A slab is given back when the last weight in it is.
struct Slab {
    static constexpr size_t LARGE = 2 << 20, USUAL = 64 << 20;
    char *memory, *free;
    size_t bytes, left;

    explicit Slab(size_t wanted) : bytes(std::max(USUAL, wanted) + LARGE) {
        void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memory = found == MAP_FAILED ? nullptr : (char*)found;
        free = (char*)((uintptr_t(memory) + LARGE - 1) & ~uintptr_t(LARGE - 1));
        left = memory ? size_t(memory + bytes - free) : 0;
        if (memory) prefer_large_pages(free, left);
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
struct Packed {
    int64_t n, k, groups, blocks;  // blocks of 32 inputs
    bool paired;
    Kept kept;
    bool halves;  // bfloat16, of which float16 are multiplied
    bool scaled;  // a group's scales follow its blocks
    int64_t blocks_bytes, group_bytes;  // of a group; kept, since a row's product asks for them at each of its groups
    char* memory = nullptr;
    std::shared_ptr<Slab> slab = nullptr;

    int64_t bytes() const { return groups * group_bytes; }
    char* group(int64_t g) const { return memory + g * group_bytes; }
    float* scales(int64_t g) const { return (float*)(group(g) + blocks_bytes); }
    // The first output of one of a group's two tiles, and how many of its 16 are outputs at all.
    int64_t column(int64_t g, int64_t half) const { return paired ? half * (n / 2) + g * 16 : g * GROUP + half * 16; }
    int64_t width(int64_t g, int64_t half) const {
        const int64_t end = paired ? (half + 1) * (n / 2) : n;
        return std::max<int64_t>(0, std::min<int64_t>(16, end - column(g, half)));
    }
    // Of few bits, an element of a block of a group.
    Element element(int64_t g, int64_t block, int64_t output, int64_t input) const {
        const Layout l = layout_of(kept);
        char* super = group(g) + block / TOGETHER_K * (TOGETHER_K * l.block_bytes() + l.super_bytes);
        return {kept, super, super + l.super_bytes + block % TOGETHER_K * l.block_bytes(), output, input};
    }
    // Of bfloat16 or float16, its place.
    char* place(int64_t g, int64_t block, int64_t output, int64_t input) const {
        const int64_t in_tiles = output / 16 * TILE + input / 2 * 32 + output % 16 * 2 + input % 2;
        return group(g) + (block * 2 * TILE + (halves ? input * GROUP + output : in_tiles)) * 2;
    }
};

// Calls visit(block, place of the output in the group, place of the input in the block, output, input) for the elements of a group.
template <typename Visit>
void visit_group(const Packed& p, int64_t g, Visit visit) {
    for (int64_t block = 0; block < p.blocks; block++)
        for (int64_t output = 0; output < GROUP; output++)
            for (int64_t i = 0; output % 16 < p.width(g, output / 16) && i < std::min<int64_t>(32, p.k - block * 32); i++)
                visit(block, output, i, p.column(g, output / 16) + output % 16, block * 32 + i);
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
            uint32_t* tile = (uint32_t*)p.place(g, block, half * 16, 0);
            const int64_t pairs = std::min<int64_t>(16, (p.k - block * 32) / 2);
            for (int64_t j = 0; j < p.width(g, half); j++) {
                const bf16* row = elements + (p.column(g, half) + j) * p.k + block * 32;
                for (int64_t pair = 0; pair < pairs; pair++) std::memcpy(tile + pair * 16 + j, row + 2 * pair, 4);
            }
        }
}

// A weight [n, k] without memory.
inline Packed unplaced(Kept kept, int64_t n, int64_t k, bool paired) {
    const int64_t outputs = paired ? n / 2 : n, per_group = paired ? 16 : GROUP, blocks = (k + 31) / 32;
    const bool halves = instructions() == HALVES && kept == BFLOAT16, scaled = halves || layout_of(kept).scaled;
    const int64_t bytes = kept == BFLOAT16 ? blocks * 4 * TILE : layout_of(kept).blocks_bytes(blocks);
    return {n, k, (outputs + per_group - 1) / per_group, blocks, paired, kept, halves, scaled,
            bytes, bytes + (scaled ? GROUP * int64_t(sizeof(float)) : 0)};
}

// In `memory`, of zeros; without elements they are there already. memory null: in a slab. null: there is none.
inline Packed* pack(const Weight& w, bool paired, char* memory) {
    const int64_t groups = (w.k + 15) / 16;
    Packed* p = new Packed(unplaced(w.kept, w.n, w.k, paired));
    p->memory = memory;
    if (!memory) std::tie(p->memory, p->slab) = Slab::take(p->bytes());
    if (!p->memory) {
        delete p;
        return nullptr;
    }
    if (!w.elements) return p;
#pragma omp parallel for
    for (int64_t g = 0; g < p->groups; g++) {
        for (int64_t i = 0; i < GROUP && p->scaled; i++)
            if (i % 16 < p->width(g, i / 16)) {
                const int64_t output = p->column(g, i / 16) + i % 16;
                p->scales(g)[i] = w.kept == BFLOAT16 ? w.half_scale(output) : w.scales[output];
            }
        if (w.kept == BFLOAT16 && !p->halves && w.k % 2 == 0) {
            copy_pairs(*p, g, (const bf16*)w.elements);
            continue;
        }
        visit_group(*p, g, [&](int64_t block, int64_t place, int64_t i, int64_t output, int64_t input) {
            if (w.kept == BFLOAT16) {
                const bf16 x = ((const bf16*)w.elements)[output * w.k + input];
                char* to = p->place(g, block, place, i);
                if (p->halves)
                    *(half*)to = narrow<half>(widen(x) / p->scales(g)[place]);
                else
                    *(bf16*)to = x;
                return;
            }
            const Element element = p->element(g, block, place, i);
            if (const Layout l = layout_of(w.kept); l.file_bytes) {
                const int64_t row = output * (w.k / l.file_inputs) * l.file_bytes;
                element.set((const uint8_t*)w.elements + row + input / l.file_inputs * l.file_bytes, input % l.file_inputs);
            } else if (w.kept == INT8) {
                element.put_level(((const int8_t*)w.elements)[output * w.k + input]);
            } else {
                const uint8_t both = ((const uint8_t*)w.elements)[output * groups * 8 + input / 2];
                element.put_level((both >> input % 2 * 4 & 15) ^ 8);  // two's complement becomes 0 to 15
                element.code() = w.steps[output * groups + input / 16];
            }
        });
    }
    return p;
}

inline void put_rounded(bf16* to, bf16 x) { *to = x; }
inline void put_rounded(float* to, bf16 x) { *to = widen(x); }

// One output's inputs [k], as `plain` has them.
template <Kept KEPT, typename To>
void plain_row_of(const Packed& p, int64_t output, To* row) {
    constexpr Layout L = layout_of(KEPT);
    const int64_t g = output / GROUP;
    const float scale = L.scaled ? p.scales(g)[output % GROUP] : 1.0f;
    char *at = p.group(g), *super = at;
    for (int64_t block = 0; block < p.blocks; block++, at += L.block_bytes()) {
        if (L.super_bytes && block % TOGETHER_K == 0) super = at, at += L.super_bytes;
        for (int64_t i = 0; i < std::min<int64_t>(32, p.k - block * 32); i++)
            put_rounded(row + block * 32 + i, narrow<bf16>(Element{KEPT, super, at, output % GROUP, i}.value() * scale));
    }
}

template <typename To, size_t... KEPT>
void choose_plain_row(const Packed& p, int64_t output, To* row, std::index_sequence<KEPT...>) {
    static constexpr void (*by_format[])(const Packed&, int64_t, To*) = {plain_row_of<Kept(KEPT + 1), To>...};
    by_format[p.kept - 1](p, output, row);
}

// The same, for weights in few bits whose outputs are not in two halves.
template <typename To>
void plain_row(const Packed& p, int64_t output, To* row) {
    choose_plain_row(p, output, row, std::make_index_sequence<FORMATS - 1>());
}

// The weight [n, k] again, rounded to bfloat16 where it was quantized.
inline void plain(const Packed& p, bf16* weight) {
    for (int64_t g = 0; g < p.groups; g++)
        visit_group(p, g, [&](int64_t block, int64_t place, int64_t i, int64_t output, int64_t input) {
            bf16& to = weight[output * p.k + input];
            if (p.kept == BFLOAT16 && !p.halves) return void(to = *(bf16*)p.place(g, block, place, i));
            const float x = p.halves ? widen(*(half*)p.place(g, block, place, i)) : p.element(g, block, place, i).value();
            to = narrow<bf16>(x * (p.scaled ? p.scales(g)[place] : 1.0f));
        });
}

}  // namespace
