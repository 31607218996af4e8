"""Loads a model's folder, quantized if asked, and prints the peak memory use in bytes.

It runs in a process of its own, so that memory of earlier tests does not count.
"""

import re
import sys
from pathlib import Path

import torch

from personae.engine.loader import load_model
from personae.engine.quantization import QUANTIZATIONS


def anonymous_memory() -> int:
    """Bytes of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]  # the kernel always reports it


def main(folder: str, quantize: str) -> None:
    peak, before = 0, anonymous_memory()

    def measure(_done: int, _total: int) -> None:
        nonlocal peak
        peak = max(peak, anonymous_memory() - before)

    form = next((name for name in QUANTIZATIONS if name == quantize), None)
    decoder = load_model(Path(folder), device=torch.device("cpu"), quantize=form, on_progress=measure)
    assert decoder.config.layers == 8
    print(peak)


if __name__ == "__main__":
    main(*sys.argv[1:])
