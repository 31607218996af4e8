// Linear layers on bfloat16 weights that were packed once.
//
// A weight [n, k] is cut into groups of 32 outputs x 32 inputs, two tiles of 1 KiB that lie one after the other in
// the order in which a product reads them. A tile is what AMX calls the second operand: [16 pairs of inputs][16
// outputs][2]. The rows x are cut into tiles of 16 rows x 32 inputs. Both instruction sets read the same layout.
//
// Each output of a row is one sum over the inputs in their order, whatever the number of rows: a row's result has
// the same bits alone and in company. (AMX and AVX-512 round differently; a machine uses one of them.)
#pragma once
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>
#include <mutex>
#include <tuple>

#include "vector.h"

namespace {

constexpr int64_t TILE = 16 * 32;     // elements of a tile
constexpr int64_t GROUP = 32;         // outputs of a group
constexpr int64_t PANEL = 32;         // rows that share a reading of a group
constexpr int64_t AHEAD = 1024;       // bytes: where the weights are prefetched; further brings less (measured)

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
struct Packed {
    int64_t n, k, groups, blocks;  // blocks of 32 inputs
    bool paired;
    bf16* tiles;
    std::shared_ptr<Slab> slab;

    const bf16* group(int64_t g) const { return tiles + g * blocks * 2 * TILE; }
    // The first output of one of a group's two tiles, and how many of its 16 are outputs at all.
    int64_t column(int64_t g, int64_t half) const { return paired ? half * (n / 2) + g * 16 : g * GROUP + half * 16; }
    int64_t width(int64_t g, int64_t half) const {
        const int64_t end = paired ? (half + 1) * (n / 2) : n;
        return std::max<int64_t>(0, std::min<int64_t>(16, end - column(g, half)));
    }
};

// Calls visit(element of the tiles, output, input) for each element of one group.
template <typename Visit>
void visit_group(const Packed& p, int64_t g, Visit visit) {
    for (int64_t block = 0; block < p.blocks; block++)
        for (int64_t half = 0; half < 2; half++) {
            bf16* tile = p.tiles + ((g * p.blocks + block) * 2 + half) * TILE;
            const int64_t column = p.column(g, half), width = p.width(g, half);
            for (int64_t i = 0; i < 32 && block * 32 + i < p.k; i++)
                for (int64_t j = 0; j < width; j++) visit(tile[i / 2 * 32 + j * 2 + i % 2], column + j, block * 32 + i);
        }
}

inline void plain(const Packed& p, bf16* weight) {
    for (int64_t g = 0; g < p.groups; g++)
        visit_group(p, g, [&](bf16 element, int64_t output, int64_t input) { weight[output * p.k + input] = element; });
}

inline Packed* pack(const bf16* weight, int64_t n, int64_t k, bool paired) {
    const int64_t outputs = paired ? n / 2 : n, per_group = paired ? 16 : GROUP;
    Packed* p = new Packed{n, k, (outputs + per_group - 1) / per_group, (k + 31) / 32, paired, nullptr, nullptr};
    char* memory;
    std::tie(memory, p->slab) = Slab::take(p->groups * p->blocks * 2 * TILE * sizeof(bf16));
    if (!memory) {
        delete p;
        return nullptr;
    }
    p->tiles = (bf16*)memory;
#pragma omp parallel for
    for (int64_t g = 0; g < p->groups; g++)
        visit_group(*p, g, [&](bf16& element, int64_t output, int64_t input) { element = weight[output * k + input]; });
    return p;
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

inline bf16* put(bf16* to, __m512 low, __m512 high) {  // 32 floats, rounded
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    std::memcpy(to, &both, 64);
    return to;
}
inline void put(bf16* to, __m512 x) {
    const __m256bh rounded = _mm512_cvtneps_pbh(x);
    std::memcpy(to, &rounded, 32);
}

inline __m512bh pair_of(const bf16* p) {  // one pair, in all lanes
    int32_t both;
    std::memcpy(&both, p, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}
inline __m512bh pairs_at(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

template <int R>
void multiply_rows(const bf16* x, const bf16* w, int64_t blocks, const float* const* bias, float* const* c) {
    __m512 sum[R][2];
    for (int r = 0; r < R; r++)
        for (int half = 0; half < 2; half++) sum[r][half] = _mm512_loadu_ps(bias[half]);
    for (int64_t block = 0; block < blocks; block++, x += TILE, w += 2 * TILE)
        for (int pair = 0; pair < 16; pair++) {
            _mm_prefetch((const char*)(w + pair * 32) + AHEAD, _MM_HINT_T0);
            _mm_prefetch((const char*)(w + TILE + pair * 32) + AHEAD, _MM_HINT_T0);
            const __m512bh w0 = pairs_at(w + pair * 32), w1 = pairs_at(w + TILE + pair * 32);
            for (int r = 0; r < R; r++) {
                const __m512bh xs = pair_of(x + r * 32 + pair * 2);
                sum[r][0] = _mm512_dpbf16_ps(sum[r][0], xs, w0);
                sum[r][1] = _mm512_dpbf16_ps(sum[r][1], xs, w1);
            }
        }
    for (int r = 0; r < R; r++) {
        _mm512_store_ps(c[0] + r * 16, sum[r][0]);
        _mm512_store_ps(c[1] + r * 16, sum[r][1]);
    }
}

// c = x (from the row that starts a panel) times one group, plus its bias, with AVX-512.
inline void multiply_avx512(const bf16* x, const bf16* w, int64_t blocks, int64_t rows, const float* const* bias,
                            const Quarters& c) {
    static void (*const few[])(const bf16*, const bf16*, int64_t, const float* const*, float* const*) = {
        multiply_rows<1>, multiply_rows<2>, multiply_rows<3>, multiply_rows<4>,
        multiply_rows<5>, multiply_rows<6>, multiply_rows<7>, multiply_rows<8>};
    for (int64_t row = 0; row < rows; row += 8) {
        float* const to[] = {c.at(row, 0), c.at(row, 1)};
        few[std::min<int64_t>(8, rows - row) - 1](x + row / 16 * blocks * TILE + row % 16 * 32, w, blocks, bias, to);
    }
}

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
constexpr bool AMX_BUILT = true;

inline bool amx_allowed() {  // the kernel wants to be asked before a process uses tiles
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return allowed;
}

struct alignas(64) Tiles {  // their shapes; none until they are given
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void shape(int tile, int64_t of_rows, int64_t of_bytes) {
        rows[tile] = uint8_t(of_rows), bytes[tile] = uint16_t(of_bytes);
    }
    void load() const { _tile_loadconfig(this); }
};

inline void begin_tiles() {
    Tiles tiles;
    for (int tile = 0; tile < 8; tile++) tiles.shape(tile, 16, 64);
    tiles.load();
}
inline void end_tiles() { _tile_release(); }

inline void prefetch_group(const bf16* w) {
    for (int64_t at = 0; at < 4 * TILE; at += 64) _mm_prefetch((const char*)w + AHEAD + at, _MM_HINT_T0);
}

// As multiply_avx512; extra() adds to the tiles of the sums before they are stored. fresh: the weights come from memory,
// and are asked for ahead; for a prompt's next rows that would only take time.
template <typename Extra>
void multiply_amx(const bf16* x, const bf16* w, int64_t blocks, int64_t rows, bool fresh, const float* const* bias,
                  const Quarters& c, Extra extra) {
    _tile_loadd(0, bias[0], 0);  // its 16 floats in each row
    _tile_loadd(1, bias[1], 0);
    if (rows <= 16) {
        for (int64_t block = 0; block < blocks; block++, x += TILE, w += 2 * TILE) {
            if (fresh) prefetch_group(w);
            _tile_loadd(4, x, 64);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        extra();
    } else {
        const bf16* below = x + blocks * TILE;
        _tile_loadd(2, bias[0], 0);
        _tile_loadd(3, bias[1], 0);
        for (int64_t block = 0; block < blocks; block++, x += TILE, below += TILE, w += 2 * TILE) {
            if (fresh) prefetch_group(w);
            _tile_loadd(4, x, 64);
            _tile_loadd(5, below, 64);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        extra();
        _tile_stored(2, c.tile[2], 64);
        _tile_stored(3, c.tile[3], 64);
    }
    _tile_stored(0, c.tile[0], 64);
    _tile_stored(1, c.tile[1], 64);
}
#else
constexpr bool AMX_BUILT = false;
inline bool amx_allowed() { return false; }
inline void begin_tiles() {}
inline void end_tiles() {}
template <typename Extra>
void multiply_amx(const bf16*, const bf16*, int64_t, int64_t, bool, const float* const*, const Quarters&, Extra) {}
#endif

inline bool& amx_on() {  // switched off by tests, which want to see both
    static bool on = AMX_BUILT && amx_allowed();
    return on;
}

struct Nothing {  // what is added to a product before it is taken: see AtHand in expand.h
    void begin(const Packed&, int64_t) {}
    void add_tiles(int64_t, int64_t) const {}
    void add(int64_t, int64_t, const Quarters&) const {}
};

// x [rows, k] times the groups `first` to `last` of a weight, plus the bias (null: none; else readable up to the
// groups' end). place(row, count, group) says where a product goes, of `count` rows from `row` on, as Quarters; all
// rows of a tile are written. take(row, count, group, c) gets it.
template <typename More, typename Place, typename Take>
void multiply(const Rows& x, int64_t rows, const Packed& w, int64_t first, int64_t last, const float* bias, More& more,
              Place place, Take take) {
    alignas(64) static const float none[16] = {};
    const bool amx = amx_on();
    if (amx) begin_tiles();
    for (int64_t g = first; g < last; g++) {
        const float* biases[] = {bias ? bias + w.column(g, 0) : none, bias ? bias + w.column(g, 1) : none};
        more.begin(w, g);
        for (int64_t row = 0; row < rows; row += PANEL) {
            const int64_t count = std::min(PANEL, rows - row);
            const bf16* panel = x.tiles + row / 16 * x.blocks * TILE;
            const Quarters c = place(row, count, g);
            if (amx) {
                multiply_amx(panel, w.group(g), w.blocks, count, row == 0, biases, c,
                             [&] { more.add_tiles(row, count); });
            } else {
                multiply_avx512(panel, w.group(g), w.blocks, count, biases, c);
                more.add(row, count, c);
            }
            take(row, count, g, c);
        }
    }
    if (amx) end_tiles();
}

// Groups per item of work: some 96 KiB of weights, a few microseconds' reading.
inline int64_t groups_per_item(const Packed& w) {
    return std::max<int64_t>(1, (96 << 10) / (w.blocks * 2 * TILE * int64_t(sizeof(bf16))));
}
inline int64_t items_of(const Packed& w) { return (w.groups + groups_per_item(w) - 1) / groups_per_item(w); }

template <typename More, typename Place, typename Take>
void multiply_item(const Rows& x, int64_t rows, const Packed& w, int64_t item, const float* bias, More& more,
                   Place place, Take take) {
    const int64_t each = groups_per_item(w), first = item * each;
    multiply(x, rows, w, first, std::min(first + each, w.groups), bias, more, place, take);
}

}  // namespace
