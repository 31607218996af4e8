"""Instructions that no case comes to: nothing is known of them."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ptx.code import read
from ptx.launches import Run

_NO_INPUTS = "the loop of a product without inputs is passed over"
UNREACHABLE = {
    "experts": (_NO_INPUTS, "moe.py:44", "moe.py:51"),
    "quantized": (_NO_INPUTS, "quantized.py:36", "quantized.py:77", "quantized.py:102"),
    "blocks": (_NO_INPUTS, "blocks.py:51", "quantized.py:102"),
}
"""By name of the contract: why, and the lines of the source."""


def unreached(name: str, runs: Iterable[Run]) -> list[str]:
    """The instructions of a name's kernels that its launches have not come to, but those of UNREACHABLE."""
    by_code: dict[tuple[str, str], NDArray[np.bool_]] = {}
    for run in runs:
        key = run.kernel, run.ptx
        by_code[key] = by_code.get(key, np.False_) | run.counts.reached
    _why, *known = UNREACHABLE.get(name, ("",))
    found = []
    for (kernel, ptx), reached in by_code.items():
        lines = read(ptx).lines
        missing = (lines[at] for at in np.flatnonzero(~reached))
        found += [
            f"{kernel}, {line.source}: {line.text}"
            for line in missing
            if line.source.rsplit(":", 1)[0] not in known
        ]
    return found
