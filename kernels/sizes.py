"""Sizes of memory as text for people."""

import math

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def size_text(size: int, *, needed: bool = False) -> str:
    """A size with two or three digits, as options take it: `1.5GiB`. A `needed` size is rounded up, an
    available one is rounded down."""
    for unit, name in _UNITS:
        if size >= unit:
            tenths = (math.ceil if needed else math.floor)(10 * size / unit)
            whole, tenth = divmod(tenths, 10)
            return (
                f"{whole}.{tenth}{name}"
                if tenth and whole < 100
                else f"{whole + bool(tenth and needed)}{name}"
            )
    return f"{size} bytes"
