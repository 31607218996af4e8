"""The GPU made of paper notices what it is for: each kind of mistake, made on purpose."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="needs Triton's compiler, and no GPU",
)
from dry_engine import DryEngine  # noqa: E402  # below the mark, which says what they need
from paper_gpu import Late, Mistake, PaperGpu  # noqa: E402
from paper_gpu.machine import StreamPosition  # noqa: E402
from tiny_adapters import make_zoo  # noqa: E402
from tiny_models import model_folder  # noqa: E402

from personae.actors import assembly  # noqa: E402
from personae.engine.device_event import DeviceToHostEvent  # noqa: E402
from personae.engine.layers.norm import RMSNorm  # noqa: E402
from personae.engine.worker import runner, step_graphs  # noqa: E402
from personae.kernels import upload  # noqa: E402
from personae.kernels.side_stream import SideStream  # noqa: E402
from personae.kernels.triton import sgmv  # noqa: E402
from personae.kernels.vmm import DeviceMemory  # noqa: E402
from personae.lora.copies import CopyEvent, StreamCopies  # noqa: E402

SMALL = 24 << 20
GRANULE = 1 << 12
SIZES = {"dtype": "float32", "max_seqs": 4, "max_batch_tokens": 64, "max_model_len": 64}
SIZES["lora_side_stream"] = True
NAMES = ("rank-64", "rslora")


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    make_zoo(root, base, NAMES)
    return root


def answers(base: Path, adapters: Path, late: Late = Late.ALL) -> tuple[DryEngine, list[list[int]]]:
    """Two adapters in the place of one another, and the base."""
    with PaperGpu(SMALL, late=late) as gpu:
        engine = DryEngine(gpu, base, adapters, adapter_memory=573_440, **SIZES)
        found = []
        for name in (*NAMES, *NAMES):
            engine.place(name)
            logs = [engine.log(f"{name} {i}", [7 + i, 8, 9], name, max_tokens=4) for i in range(2)]
            found += [
                one.tokens for one in engine.play([*logs, engine.log(name, [5], max_tokens=4)]).values()
            ]
            engine.engine.worker.release(engine.cards[name].adapter or "")
        return engine, found


@pytest.fixture(scope="module")
def truth(base: Path, adapters: Path) -> list[list[int]]:
    """What every schedule brings without a mistake."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "warm_up", lambda runner: None)
        (first, *others) = [answers(base, adapters, late)[1] for late in Late]
    assert all(other == first for other in others)
    return first


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "warm_up", lambda runner: None)  # for speed


def unpinned(arrays, device):  # type: ignore[no-untyped-def]  # as the original
    return tuple(torch.from_numpy(np.ascontiguousarray(a)).to(device, non_blocking=True) for a in arrays)


def reading(self: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.sum().item() != 0.125
    return NORM(self, x, residual)


NORM = RMSNorm.add


def test_an_index_of_the_host(base, adapters, monkeypatch) -> None:
    monkeypatch.setattr(runner, "uploads", lambda arrays, device: tuple(map(torch.from_numpy, arrays)))
    with pytest.raises(Mistake, match="cuda and cpu together"):
        answers(base, adapters)


def test_a_copy_from_memory_that_is_not_pinned(base, adapters, monkeypatch, truth) -> None:
    monkeypatch.setattr(runner, "uploads", unpinned)
    engine, found = answers(base, adapters)
    assert found == truth
    assert {wait.kind for wait in engine.waits["prepare"]} == {
        "a copy to the device of memory that is not pinned"
    }


def test_a_value_that_is_read_in_a_layer(base, adapters, monkeypatch, caplog) -> None:
    monkeypatch.setattr(RMSNorm, "add", reading)
    engine, _ = answers(base, adapters)
    assert any("norm" in str(wait) or "notices" in str(wait) for wait in engine.waits["forward"])
    assert "a value is read while a graph is captured" in caplog.text  # and so there are no graphs


def test_numbers_of_another_dtype(base, adapters, monkeypatch) -> None:
    wide = lambda arrays, device: upload.uploads([a.astype(np.int64) for a in arrays], device)  # noqa: E731
    monkeypatch.setattr(runner, "uploads", wide)
    with pytest.raises(RuntimeError, match="size of tensor"):  # the copies for a graph are of 32-bit words
        answers(base, adapters)


def test_tokens_that_are_read_before_they_are_there(base, adapters, monkeypatch, truth) -> None:
    monkeypatch.setattr(DeviceToHostEvent, "wait", lambda self: None)
    with suppress(Exception):  # if it comes so far
        assert answers(base, adapters)[1] != truth


@pytest.mark.parametrize(
    ("owner", "name"),
    [(CopyEvent, "wait"), (StreamCopies, "begin")],
    ids=["wait for it", "begin behind the steps"],
)
def test_copies_beside_the_steps_without_an_order(owner, name, base, adapters, monkeypatch, truth) -> None:
    monkeypatch.setattr(owner, name, lambda self: None)
    assert any(answers(base, adapters, late)[1] != truth for late in Late)


def forked_once(self: SideStream) -> AbstractContextManager[None]:
    """As `fork`, but only the first one of a graph waits."""
    if not any(isinstance(entry, StreamPosition) for entry in entries(self)):
        return FORK(self)
    return torch.cuda.stream(self._stream)


def joined_by_turns(self: SideStream) -> None:
    """As `join`, but for every second one."""
    if sum(isinstance(entry, StreamPosition) for entry in entries(self)) % 2 == 0:
        torch.cuda.current_stream().wait_stream(self._stream)


def entries(branch: SideStream) -> list[object]:
    recording = branch._stream.here.capturing
    return [] if recording is None else [entry for _, entry in recording.lines.get(branch._stream.stream, [])]


def taken_on_the_branch(x, weight_pools, tables, work, branch, gpu):  # type: ignore[no-untyped-def]  # as the original
    work.plans.clear()  # which has the memory for the split sums
    with branch.fork():
        update = sgmv.Update(x, weight_pools, tables, work, gpu, early=False)
        update.shrink(sgmv.SIDE_STREAM_PROGRAMS)
    return lambda ys: (branch.join(), update.expand(ys))


FORK = SideStream.fork
BRANCHES = {
    "a fork that waits for nothing": (SideStream, "fork", forked_once),
    "a join that waits for nothing": (SideStream, "join", joined_by_turns),
    "memory taken on the branch": (sgmv, "begin_sgmv", taken_on_the_branch),
}


@pytest.mark.parametrize("mistake", BRANCHES)
def test_a_branch_of_a_graph_without_an_order(mistake, base, adapters, monkeypatch, truth, caplog) -> None:
    monkeypatch.setattr(*BRANCHES[mistake])
    assert all(answers(base, adapters, late)[1] == truth for late in Late), "its trial finds it out"
    assert "a graph's result differs" in caplog.text
    monkeypatch.setattr(step_graphs, "check", lambda found, wanted: None)
    assert any(answers(base, adapters, late)[1] != truth for late in Late)


def test_a_branch_that_is_never_joined(base, adapters, monkeypatch, caplog, truth) -> None:
    monkeypatch.setattr(SideStream, "join", lambda self: None)
    assert answers(base, adapters)[1] == truth  # without graphs
    assert "the capture ends before side" in caplog.text


def test_a_kernel_that_begins_early_behind_another_than_its_own(base, adapters, monkeypatch, caplog) -> None:
    update = sgmv.Update.__init__
    early = lambda self, *args, **options: update(self, *args, **{**options, "early": True})  # noqa: E731
    monkeypatch.setattr(sgmv.Update, "__init__", early)
    answers(base, adapters)
    assert "expand_kernel begins early behind" in caplog.text


def test_memory_that_another_stream_still_reads() -> None:
    def doubled(keep: bool) -> list[float]:
        with PaperGpu(SMALL, late=Late.SIDE):
            x, side = torch.ones(3, device="cuda"), torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x * 2
            if keep:
                x.record_stream(side)
            del x
            z = torch.zeros(3, device="cuda")  # its memory, perhaps
            torch.cuda.current_stream().wait_stream(side)
            return (y + z).tolist()

    assert doubled(keep=True) == [2.0, 2.0, 2.0]
    assert np.isnan(doubled(keep=False)).all()


def test_a_pinned_buffer_that_is_written_before_it_was_copied() -> None:
    with PaperGpu(SMALL):
        buffer = torch.empty(2, pin_memory=True).fill_(1.0)
        there = buffer.to("cuda", non_blocking=True)
        buffer.fill_(9.0)
        assert there.tolist() == [9.0, 9.0]


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "a value is read": lambda x: bool(x.sum() > 0),
    "a copy to the host blocks": lambda x: x.tolist(),
    "a copy to the device blocks": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "a scalar is copied for an assignment by index": lambda x: x.__setitem__(torch.zeros_like(x).long(), 1.0),
    "how large the result is depends on values": lambda x: x[x > 0],
    "through memory in between": lambda x: x.copy_(torch.ones(4, dtype=torch.float16, pin_memory=True), True),
}


@pytest.mark.parametrize("kind", WAITS)
def test_whatever_makes_the_host_wait(kind: str) -> None:
    with PaperGpu(SMALL) as gpu:
        WAITS[kind](torch.ones(4, device="cuda"))
        (wait,) = gpu.machine.waits
        assert kind in wait.kind
        assert "test_dry_run_notices.py" in wait.where[0]


def test_launches_that_cuda_or_the_kernels_would_not_take() -> None:
    from personae.kernels.triton import pointwise

    with PaperGpu(SMALL):
        x, host = torch.ones(4, 64, device="cuda"), torch.ones(64)
        weight = torch.ones(64, device="cuda")
        odd = torch.ones(257, device="cuda")
        norm = partial(pointwise.rms_norm, residual=None, eps=1e-5)
        wrong: dict[str, Callable[[], object]] = {
            "is a tensor of cpu": lambda: norm(x, weight=host),
            "strides": lambda: norm(x[:, ::2], weight=weight[:32]),
            "16 bytes": lambda: norm(odd[1:].view(4, 64), weight=weight),
            "points to torch.float8_e5m2": lambda: norm(x.to(torch.float8_e5m2), weight=weight),
            "a grid of": lambda: launch(x, 0),
            "32 bits": lambda: launch(x, 1, 2**31),
        }
        for what, call in wrong.items():
            with pytest.raises(Mistake, match=what):
                call()
        with pytest.raises(KeyError, match="num_warp"):
            launch(x, 1, num_warp=4)


def test_a_launch_with_the_address_of_memory_that_was_given_back() -> None:
    with PaperGpu(SMALL, granule=GRANULE):
        memory = DeviceMemory(torch.device("cuda"), 2 * GRANULE)
        x = memory.reserve((2 * GRANULE // 256, 64), torch.float32)
        memory.map(x)
        launch(x, 1)
        torch.cuda.synchronize()
        memory.unmap(x[len(x) // 2 :])
        launch(x, 1)  # what it reads it finds
        memory.unmap(x[: len(x) // 2])
        with pytest.raises(Mistake, match="begins where nothing is mapped"):
            launch(x, 1)


def launch(x: torch.Tensor, blocks: int, stride: int = 64, **options: int) -> None:
    """One of the kernels, by hand."""
    from personae.kernels.triton.device.pointwise import rms_norm_kernel

    sizes = {"SIZE": 64, "WIDE": 64, "ADD": False}
    rms_norm_kernel[(blocks,)](x, x, x, x, x, stride, 0, 0, 1, 1e-5, **sizes, **options)


def test_memory_that_there_is_not() -> None:
    with PaperGpu(SMALL), pytest.raises(torch.OutOfMemoryError):
        torch.empty(SMALL, device="cuda")
