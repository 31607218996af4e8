// Which rows are multiplied with a group of the output matrix's 32 outputs: not those whose grammar leaves all of them out.
#pragma once
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace {

// Rows that need much come first: so those that need a group are nearly all that come before the last of them.
struct Needed {
    std::vector<int64_t> rows;      // in the order in which they are multiplied
    std::vector<int32_t> of_group;  // how many of them

    // `bits` [count][groups]: a bit for each output; null: all.
    void set(const uint32_t* bits, int64_t count, int64_t groups) {
        rows.resize(count);
        std::iota(rows.begin(), rows.end(), 0);
        of_group.assign(groups, bits ? 0 : int32_t(count));
        if (!bits) return;
        std::vector<int64_t> without(count);
        for (int64_t row = 0; row < count; row++)
            without[row] = std::count(bits + row * groups, bits + (row + 1) * groups, 0u);
        std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) { return without[a] < without[b]; });
        for (int64_t place = 0; place < count; place++) {
            const uint32_t* wanted = bits + rows[place] * groups;
            for (int64_t g = 0; g < groups; g++)
                if (wanted[g]) of_group[g] = int32_t(place + 1);
        }
    }
};

}  // namespace
