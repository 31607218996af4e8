// SGMV in bfloat16: the low-rank updates of a step's adapters, planned once and the same in every layer.
//
// Shrink: t = x A^T, summed in float32 and rounded to bfloat16, as every input of a product is. Expand: y += t B, a
// page of 8 ranks after the other: the even ranks' products, the odd ones', and the two sums to y. That is how a tile
// instruction adds, so a row's bits are the same whether tiles add them or, where there are few rows, registers.
#pragma once
#include <vector>

#include "product.h"

namespace {

constexpr int64_t RANKS = 8;   // ranks of a page; those past an adapter's own are zero
constexpr int64_t QUAD = 4;    // pages whose ranks fill a row of a tile
constexpr int64_t FEW = 8;     // up to so many rows of an adapter read its weights as they lie, from end to end
constexpr int64_t WIDE = 512;  // outputs per item of expand where few adapters have to be shared out
constexpr int64_t PAGES = 4;   // pages per item of shrink, where rows are few
constexpr int64_t BAND = 32;   // rows per item of shrink; of tiles the 16 columns

struct LoraModule {  // one of q, k, v, o, gate, up, down, in all layers
    const bf16 *a, *b;
    int64_t a_layer, b_layer;  // elements between layers
    const int32_t *rank, *pages;  // rank null: the model has no such module
    int64_t max_pages, in, out;

    const bf16* page_of_b(int32_t page, int64_t layer) const { return b + layer * b_layer + page * RANKS * out; }
};

constexpr int MODULES = 7;

struct Lora {
    const int32_t *first_row, *rows, *adapter;
    int64_t segments;
    LoraModule module[MODULES];
};

enum Input { QKV, O, GATE_UP, DOWN, INPUTS };
constexpr int FIRST_MODULE[] = {0, 3, 4, 6, MODULES};

// One adapter's module in this step. Its t lies as tiles, rows of 32 ranks that are zero past its own, and from the
// tile of its first row to that of its last, zero where a row is not its own.
struct Update {
    int64_t module, row, rows, pages, shrunk;  // shrunk: where its t begins
    const int32_t* page;

    int64_t first() const { return row / 16 * 16; }
    int64_t tall() const { return (row + rows + 15) / 16 * 16 - first(); }
    int64_t quads() const { return (pages + QUAD - 1) / QUAD; }
    int64_t at(int64_t of, int64_t p) const {  // of row `of` of the step, the ranks of page p
        return shrunk + (p / QUAD * tall() + of - first()) * 32 + p % QUAD * RANKS;
    }
};

// What shrink leaves: t, rounded to bfloat16, as tiles, and the same numbers as floats in the same places.
struct Shrunk {
    bf16* tiles = nullptr;
    float* floats = nullptr;

    struct Memory {
        std::vector<bf16> tiles;
        std::vector<float> floats;
    };

    Shrunk() = default;
    Shrunk(Memory& memory, int64_t size) {
        memory.tiles.clear(), memory.floats.clear();
        tiles = aligned(memory.tiles, size), floats = aligned(memory.floats, size);
    }
    // The ranks of a page, in the first 8 of `ranks`.
    void put(int64_t to, Vec ranks) const {
        alignas(64) bf16 round[LANES];
        alignas(64) float wide[LANES];
        ::put(round, ranks), store(wide, load(round));
        std::memcpy(tiles + to, round, RANKS * sizeof(bf16));
        std::memcpy(floats + to, wide, RANKS * sizeof(float));
    }
};

// Of a page, whose sums are [rows][8].
inline void put_ranks(const float* sums, int64_t rows, const Shrunk& t, int64_t to) {
    for (int64_t i = 0; i < rows; i++) {
        float ranks[LANES] = {};
        std::memcpy(ranks, sums + i * RANKS, RANKS * sizeof(float));
        t.put(to + i * 32, load(ranks));
    }
}

struct Run {  // rows that take one adapter, or none
    int64_t row, rows;
    int64_t update[MODULES];  // -1: none
    bool adapted = false;

    bool few() const { return adapted && rows <= FEW; }
};

struct RankPage {  // a page of A: where it lies in layer 0, and where the first row's t goes
    const bf16* a;
    int64_t layer, to;
};

struct Shrink {  // an item: pages times up to BAND rows
    int64_t first, pages, row, rows, skipped;  // rows of the run before this item's
};

struct Expand {  // an item: some outputs of an update of few rows
    int64_t update, first, count;
};

struct LoraPlan {
    std::vector<Run> runs;  // all rows, in their order
    std::vector<Update> updates;
    std::vector<RankPage> pages[INPUTS];
    std::vector<Shrink> shrink[INPUTS];
    std::vector<Expand> expand[INPUTS];
    bool at_hand = false;  // an adapter has many rows: its updates are made while the base's product is at hand
    int64_t size = 0;      // elements of t

    // Many adapters: each is an item, its B read from end to end. Their number is of no consequence to the bits.
    static bool many(const Lora& lora, int threads) { return lora.segments >= 4 * threads; }

    LoraPlan(const Lora& lora, int64_t count, int threads) {
        int64_t at = 0;
        for (int64_t i = 0; i < lora.segments; i++) {
            if (!lora.rows[i]) continue;
            if (lora.first_row[i] > at) runs.push_back(plain(at, lora.first_row[i] - at));
            Run run = plain(lora.first_row[i], lora.rows[i]);
            at = run.row + run.rows;
            for (int input = 0; input < INPUTS; input++) take(lora, lora.adapter[i], Input(input), run, threads);
            at_hand |= run.adapted && !run.few();
            runs.push_back(run);
        }
        if (at < count) runs.push_back(plain(at, count - at));
    }

    static Run plain(int64_t row, int64_t rows) { return {row, rows, {-1, -1, -1, -1, -1, -1, -1}}; }

   private:
    void take(const Lora& lora, int32_t slot, Input input, Run& run, int threads) {
        const int64_t first = int64_t(pages[input].size());
        for (int module = FIRST_MODULE[input]; module < FIRST_MODULE[input + 1]; module++) {
            const LoraModule& m = lora.module[module];
            const int64_t count = m.rank ? (m.rank[slot] + RANKS - 1) / RANKS : 0, id = int64_t(updates.size());
            if (!count) continue;
            updates.push_back({module, run.row, run.rows, count, size, m.pages + slot * m.max_pages});
            const Update& u = updates.back();
            size += u.quads() * u.tall() * 32;
            run.update[module] = id;
            run.adapted = true;
            for (int64_t p = 0; p < count; p++)
                pages[input].push_back({m.a + u.page[p] * RANKS * m.in, m.a_layer, u.at(run.row, p)});
            if (run.rows > FEW) continue;
            const int64_t wide = many(lora, threads) ? m.out : WIDE;
            for (int64_t c = 0; c < m.out; c += wide) expand[input].push_back({id, c, std::min(wide, m.out - c)});
        }
        const int64_t last = int64_t(pages[input].size()), each = run.rows > FEW ? last - first : PAGES;
        const int64_t band = instructions() == TILES ? 16 : BAND;
        for (int64_t row = 0; row < run.rows; row += band)
            for (int64_t p = first; p < last; p += each)
                shrink[input].push_back(
                    {p, std::min(each, last - p), run.row + row, std::min(band, run.rows - row), row});
    }
};

// Memory of one thread for operands that are put into another order.
struct LoraScratch {
    std::vector<bf16> memory[2];
    std::vector<float> wide;

    float* floats(int64_t size) { return aligned(wide, size); }

    // At least `size` elements, aligned; zeros at first.
    bf16* take(int which, int64_t size) {
        if (int64_t(memory[which].size()) < size + 32) memory[which].assign(size + 32, bf16{0});
        return (bf16*)((uintptr_t(memory[which].data()) + 63) & ~uintptr_t(63));
    }
    bf16* columns(int64_t size) { return take(0, size); }
    bf16* tiles(int64_t size) { return take(1, size); }
};

}  // namespace
