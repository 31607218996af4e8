"""A rank's process on a GPU made of paper, with gloo in the place of NCCL.

`on_paper` has the ranks of a test's process started so. Each process has a simulated GPU of its own, and what
the ranks exchange goes through the host.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from failing_rank import started_by
from paper_gpu import PaperGpu
from torch import Tensor

from personae.engine.parallel import process_groups

PART_TOKENS = 8
"""Steps of twice as many tokens have halves, in the processes of ranks and where a test sets it."""

_HERE = Path(__file__).resolve()
_new_group = process_groups._new_group


class Carried:
    """An exchange that is done when somebody waits for it. The GPU's stream waits then, and not the host."""

    def __init__(self, group: "PaperNccl", arrive: Callable[[], None]) -> None:
        self._arrive, self._done = arrive, False
        assert all(other is group for other in _under_way.values()), "two groups may wait for each other"
        _under_way[self] = group

    def wait(self) -> None:
        """Have it done."""
        if not self._done:
            self._done = True
            del _under_way[self]
            self._arrive()


_under_way: "WeakKeyDictionary[Carried, PaperNccl]" = WeakKeyDictionary()


class PaperNccl:
    """A process group for tensors on simulated GPUs. It refuses others, as NCCL does, and exchanges of two
    groups at the same time, which NCCL may never end."""

    def __init__(self, library: str, *place: Any) -> None:
        assert library == "nccl"
        self._gloo: Any = _new_group("gloo", *place)

    def _carried(self, output: Tensor, input: Tensor, carry: Callable[[Tensor, Tensor], Any]) -> Carried:
        assert output.device.type == input.device.type == "cuda", "NCCL carries no host tensors"
        there, here = torch.empty(output.shape, dtype=output.dtype, device="cpu"), input.cpu()
        work = carry(there, here)

        def arrive() -> None:
            work.wait()
            output.copy_(there)

        return Carried(self, arrive)

    def _allgather_base(self, output: Tensor, input: Tensor) -> Carried:
        return self._carried(output, input, self._gloo._allgather_base)

    def alltoall_base(self, output: Tensor, input: Tensor, *splits: list[int]) -> Carried:
        return self._carried(output, input, lambda out, own: self._gloo.alltoall_base(out, own, *splits))


@contextmanager
def on_paper(patch: pytest.MonkeyPatch, folder: Path, gpus: int) -> Iterator[None]:
    """A machine with so many GPUs, for a test that has one itself."""
    from personae.actors import rank_options
    from personae.engine.parallel import ranks

    for module in (rank_options, ranks):
        patch.setattr(module, "visible_devices", lambda: [f"paper-{number}" for number in range(gpus)])
    patch.setattr(process_groups, "_new_group", PaperNccl)
    with started_by(_HERE, folder):
        yield


def main(asked: str, module: str, *arguments: str) -> None:
    """Run a rank's process."""
    from personae.engine.parallel import process
    from personae.engine.worker import runner

    assert (asked, module) == ("-m", process.__name__)
    process_groups._new_group = PaperNccl  # type: ignore[assignment]  # which has its signature
    runner.PART_TOKENS = PART_TOKENS
    sys.argv = [module, *arguments]
    with PaperGpu():
        process.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
