// AMX: its tiles, and the product of a panel of rows with a group of weights in them.
#pragma once
#include "sources.h"

namespace {

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
struct alignas(64) Tiles {  // their shapes; none until they are given
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void shape(int tile, int64_t of_rows, int64_t of_bytes) {
        rows[tile] = uint8_t(of_rows), bytes[tile] = uint16_t(of_bytes);
    }
    void load() const {
        asm volatile("" : : "r"(this) : "memory");  // GCC 12 takes the intrinsic to read the first eight bytes alone
        _tile_loadconfig(this);
    }
};

// Of products of `rows` in all: a tile instruction takes a cycle for each row of its first operand, and few are few lines too.
inline void begin_tiles(int64_t rows = 32) {
    Tiles tiles;
    for (int tile = 0; tile < 8; tile++) tiles.shape(tile, tile < 2 || tile == 4 ? std::clamp<int64_t>(rows, 1, 16) : 16, 64);
    tiles.load();
}
inline void begin_level_tiles() {  // of 32 whole numbers
    Tiles tiles;
    tiles.shape(0, 16, 64), tiles.shape(4, 16, 32), tiles.shape(6, 8, 64);
    tiles.load();
}
inline void end_tiles() { _tile_release(); }

// The sums of up to 16 rows are in tiles 0 and 1, of the next 16 in 2 and 3.
inline void load_sums(const Quarters& c, int64_t rows) {
    _tile_loadd(0, c.tile[0], 64);
    _tile_loadd(1, c.tile[1], 64);
    if (rows <= 16) return;
    _tile_loadd(2, c.tile[2], 64);
    _tile_loadd(3, c.tile[3], 64);
}
inline void store_sums(const Quarters& c, int64_t rows) {
    _tile_stored(0, c.tile[0], 64);
    _tile_stored(1, c.tile[1], 64);
    if (rows <= 16) return;
    _tile_stored(2, c.tile[2], 64);
    _tile_stored(3, c.tile[3], 64);
}

// Asks for what will soon be read.
inline void ask(const bf16* block) {
    for (int64_t line = 0; line < 2 * TILE; line += 32) __builtin_prefetch(block + TILE + line);
}

// The sums of 32 outputs become these, of all rows.
inline void begin_sums(const float* const* first, int64_t rows) {
    _tile_loadd(0, first[0], 0);  // its 16 floats in each row
    _tile_loadd(1, first[1], 0);
    if (rows <= 16) return;
    _tile_loadd(2, first[0], 0);
    _tile_loadd(3, first[1], 0);
}

// What a product of many rows asks for meanwhile: so many lines with each block, in the second cache.
struct Ahead {
    const char* next;
    int64_t lines;

    void ask() {
        for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
    }
};

// The sums in the tiles += x times some blocks of a group. x: from the row that starts a panel; `below`: from its row 16. fresh: by the
// first rows that meet them. passing: these rows are read and do not take the weights' place in the first cache.
template <bool passing>
void multiply_tiles(const bf16* x, const bf16* below, const bf16* tiles, int64_t blocks, int64_t rows, bool fresh, Ahead& ahead) {
    if (rows <= 16) {
        for (int64_t block = 0; block < blocks; block++, x += TILE, tiles += 2 * TILE) {
            if (fresh) ask(tiles);
            ahead.ask();
            if (passing)
                _tile_stream_loadd(4, x, 64);
            else
                _tile_loadd(4, x, 64);
            _tile_loadd(6, tiles, 64);
            _tile_loadd(7, tiles + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
    } else {
        for (int64_t block = 0; block < blocks; block++, x += TILE, below += TILE, tiles += 2 * TILE) {
            if (fresh) ask(tiles);
            ahead.ask();
            if (passing) {
                _tile_stream_loadd(4, x, 64);
                _tile_stream_loadd(5, below, 64);
            } else {
                _tile_loadd(4, x, 64);
                _tile_loadd(5, below, 64);
            }
            _tile_loadd(6, tiles, 64);
            _tile_loadd(7, tiles + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}
#else
inline void begin_tiles(int64_t = 32) {}
inline void begin_level_tiles() {}
inline void end_tiles() {}
inline void load_sums(const Quarters&, int64_t) {}
inline void store_sums(const Quarters&, int64_t) {}
inline void begin_sums(const float* const*, int64_t) {}
struct Ahead {
    const char* next;
    int64_t lines;
};
template <bool>
void multiply_tiles(const bf16*, const bf16*, const bf16*, int64_t, int64_t, bool, Ahead&) {}
#endif

}  // namespace
