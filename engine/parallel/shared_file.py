"""The file through which the ranks of a stage exchange what they compute (`SharedMemory`): its layout.

It has four areas: for what all ranks exchange in a step, or in the first half of one; in the second half;
for what those of one kind exchange; and for those of a group. In each every rank has a counter, and behind
the counters are two slots for each rank. Behind the areas is the same again for decoders that run in one call
(`RankSums`). Nothing here needs torch, so a process that only starts ranks can make the file.
"""

import mmap

from personae.kernels.memory_file import nameless_file

SLOT_BYTES = 2**21  # what a rank can give at a time; larger tensors go in parts
SUMS_BYTES = 2**27  # the same in a decoder that runs in one call; no memory until it is used
AREAS = 4  # no memory until they are used
COUNTER_STEP = 8  # from one counter to the next, in 64-bit numbers: a cache line


def new_shared_file(size: int) -> int:
    """The descriptor of a new file that has room for what `size` ranks exchange."""
    return nameless_file(AREAS * parts_bytes(size) + sums_bytes(size))


def parts_bytes(size: int) -> int:
    """What an area has, for the calls of `Parts`."""
    return mmap.PAGESIZE * -(-8 * COUNTER_STEP * size // mmap.PAGESIZE) + 2 * size * SLOT_BYTES


def sums_bytes(size: int) -> int:
    """What it has behind that for `RankSums`: a page of counters, and the slots."""
    return mmap.PAGESIZE + 2 * size * SUMS_BYTES
