"""Python on a machine with a GPU made of paper, for the scripts of evals/bench/gpu: the kit runs with small
shapes and each time is measured once. `-m pip` does nothing, because what it would install is here. Other
modules run as they are: what serves has processes and threads of its own, which know no paper."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest

MEMORY = 1 << 30


def main(kind: str, named: str, *arguments: str) -> None:
    """Run what Python would have run."""
    if named == "pip":
        return
    if kind == "-m" and named != "personae.evals.bench.gpu":
        os.execv(sys.executable, [sys.executable, kind, named, *arguments])
    import paper_kit
    from paper_gpu import PaperGpu

    with pytest.MonkeyPatch.context() as patch, PaperGpu(MEMORY, granule=1 << 14) as gpu:
        if kind == "-c":
            exec(named, {"__name__": "__main__"})  # a line of the script's own
            return
        paper_kit.shrink(patch)
        paper_kit.double_events(patch)
        patch.setattr(sys, "argv", [named, *arguments])
        status = paper_kit.bench.main()
        print("captures:", *gpu.machine.captures)
    raise SystemExit(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
