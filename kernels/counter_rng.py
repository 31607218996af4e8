"""Counter-based random numbers: the uniform number that chooses a token depends only on (seed, position).

There is no generator, and so no state to keep, lose or share. A row draws the same number alone or in a
batch, before or after a preemption, on this machine or another. The function is SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), used as a counter. All arithmetic is
modulo 2**64:

    mix(z):  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
             z = (z ^ (z >> 27)) * 0x94D049BB133111EB
             return z ^ (z >> 31)

    stream(seed)              = mix(seed + GOLDEN),    GOLDEN = 0x9E3779B97F4A7C15
    uniform(stream, position) = (mix(stream + (position + 1) * GOLDEN) >> 11) * 2**-53

A choice that replaces another draws from again(stream, attempt) = mix(stream + attempt).

The seed is mixed first, so that seeds 1, 2, 3, … are not the same stream shifted by one position. There are
only multiplications, shifts and exclusive-ors of 64-bit integers, and the last product is exact. So a kernel
on any device gives the same bits.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def stream(seed: int) -> np.uint64:
    """The stream of `seed` (any integer, modulo 2**64), for `uniforms`."""
    result: np.uint64 = _mix(np.array([seed & _MASK], np.uint64) + _GOLDEN)[0]
    return result


def again(streams: NDArray[np.uint64], attempt: int) -> NDArray[np.uint64]:
    """The streams of the `attempt`-th choice (from 1) that replaces another at the same position."""
    return _mix(streams + np.uint64(attempt))


def uniforms(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each pair of a stream and a position. All shapes are [rows]."""
    bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
