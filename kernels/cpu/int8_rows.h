// Keys and values in int8: a head's row of a token is `dim` numbers q and their scale s, a bfloat16; the values are q s.
#pragma once
#include <cmath>

#include "vector.h"

namespace {

constexpr int64_t SCALE_BYTES = 2;
constexpr int64_t MOST_IN_INT8 = 512;  // dimensions of a head; fused.py has it too

// Numbers x -> a row. s = max|x| / 127; not finite if any x is not, so that the values are not either.
template <typename T> inline void quantize_row(const T* x, int64_t dim, char* to) {
    float most = 0.0f, finite = 0.0f;
    for (int64_t d = 0; d < dim; d++) {
        const float value = widen(x[d]);
        most = std::max(most, std::fabs(value));
        finite += value * 0.0f;
    }
    const bf16 scale = narrow<bf16>(most / 127.0f + finite);
    const float divisor = widen(scale);
    std::memcpy(to + dim, &scale, SCALE_BYTES);
    if (!(divisor > 0.0f)) {
        std::memset(to, 0, dim);
        return;
    }
    for (int64_t d = 0; d < dim; d++)
        to[d] = char(int8_t(std::min(127.0f, std::max(-127.0f, std::nearbyint(widen(x[d]) / divisor)))));
}

inline float scale_of(const char* row, int64_t dim) {
    bf16 scale;
    std::memcpy(&scale, row + dim, SCALE_BYTES);
    return widen(scale);
}

}  // namespace
