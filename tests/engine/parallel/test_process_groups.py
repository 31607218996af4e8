"""Ranks that exchange through `torch.distributed`: the bits of shared memory, and the answers of one process.
gloo carries here what NCCL carries between GPUs."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from assembled import Assembled
from engine_harness import comms_of, join
from shared_model import EVERY_KIND, ON_EXPERTS, adapters_of, answers, same_answers
from tiny_models import make_model_folder, model_folder

from personae.engine.parallel import process_groups
from personae.engine.parallel.comm import Comm
from personae.engine.parallel.process_groups import ProcessGroups

# PEFT warns that rank_pattern's key for experts matches no module, and then applies it to the parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
ROOT = Path(__file__).resolve().parents[3]


def on_each(comms: list[Comm], call: str, parts: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    """What each rank gets from a call."""
    with ThreadPoolExecutor(len(comms)) as threads:
        calls = [
            threads.submit(getattr(comm, call), part.clone(), *args)
            for comm, part in zip(comms, parts, strict=True)
        ]
        return [each.result(60) for each in calls]


@pytest.mark.parametrize("bound", [0, 2**18])  # in slices, and whole
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_shared_memory_on_every_rank(
    size: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups, "WHOLE_BYTES", bound)
    shared, made = comms_of(size), comms_of(size, library="gloo")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((13, 97), (1, 1), (0, 8)):
            parts = list(torch.randn(size, *shape, generator=torch.Generator().manual_seed(size)).to(dtype))
            expected = on_each(shared, "all_reduce", parts)
            for found, same in zip(on_each(made, "all_reduce", parts), expected, strict=True):
                assert torch.equal(found, same)
                assert found.dtype is dtype


def test_a_rows_sum_does_not_depend_on_the_rows_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_groups, "WHOLE_BYTES", 1024)  # a row goes whole, all rows in slices
    parts, comms = list(torch.randn(3, 32, 64)), comms_of(3, library="gloo")
    together = on_each(comms, "all_reduce", parts)[0]
    for row in range(32):
        alone = on_each(comms, "all_reduce", [part[row : row + 1] for part in parts])[0]
        assert torch.equal(alone[0], together[row])


def test_a_sum_is_written_to_a_contiguous_tensor_and_a_strided_one_stays() -> None:
    comms = comms_of(2, library="gloo")
    given = [torch.ones(5, 8) for _ in comms]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda comm, x: comm.all_reduce(x), comms, given))
        strided = list(threads.map(lambda comm, x: comm.all_reduce(x[:, ::2]), comms, given))
    assert [each.data_ptr() for each in found] == [each.data_ptr() for each in given]
    assert torch.equal(strided[1], torch.full((5, 4), 4.0))
    assert torch.equal(given[1], torch.full((5, 8), 2.0))


@pytest.mark.parametrize(
    ("call", "shapes", "args"),
    [
        ("all_gather", [(7, 10), (7, 11), (7, 9)], ([10, 11, 9],)),
        ("gather_rows", [(4, 6), (0, 6), (1, 6)], ([4, 0, 1],)),
        ("gather_rows", [(4, 6), (0, 6), (1, 6)], ([4, 0, 1], range(1, 3))),
        ("gather_rows", [(0, 6)] * 3, ([0, 0, 0],)),
        ("reduce_scatter", [(5, 6)] * 3, ([4, 0, 1],)),
        ("reduce_scatter", [(0, 6), (5, 6), (5, 6)], ([4, 0, 1], range(1, 3))),
        ("reduce_scatter", [(0, 6)] * 3, ([0, 0, 0],)),
    ],
)
def test_parts_of_different_sizes_are_those_of_shared_memory(
    call: str, shapes: list[tuple[int, int]], args: tuple[Any, ...]
) -> None:
    parts = [torch.randn(*shape) for shape in shapes]
    expected = on_each(comms_of(3), call, parts, *args)
    for found, same in zip(on_each(comms_of(3, library="gloo"), call, parts, *args), expected, strict=True):
        assert torch.equal(found, same)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_store_of_ranks_listens_on_loopback_only() -> None:
    before = _listening()
    store, port = process_groups.new_store()
    comms = comms_of(2, library="gloo")
    opened = _listening() - before
    assert f"0100007F:{port:04X}" in opened
    assert {address.partition(":")[0] for address in opened} == {"0100007F"}
    del store, comms


def _listening() -> set[str]:
    """The addresses at which this process listens on TCP, as the system writes them."""
    links = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            links.add(os.readlink(link))
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()[1:]
    ]
    return {each[1] for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in links}


def test_a_rank_that_waits_for_one_that_has_ended_says_so() -> None:
    def ended() -> None:
        raise RuntimeError("rank 1 ended")

    ranks = [ProcessGroups(rank, 2, ended) for rank in range(2)]  # type: ignore[arg-type]  # it does not return
    join(ranks, "gloo")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ranks[0].all_reduce, torch.ones(3))
        ranks[1]._group.abort()  # type: ignore[attr-defined]  # torch's own
        del ranks[1]._group
        with pytest.raises(RuntimeError, match="rank 1 ended"):
            waiting.result(60)


class Watched:
    """A group of a rank. `under_way`: of the rank's groups, one for each exchange that nobody has waited for.
    `together`: how many exchanges have begun while another group had one under way."""

    def __init__(self, group: Any, under_way: "list[Watched]") -> None:
        self._group, self._under_way, self.together = group, under_way, 0

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor) -> Any:
        self.together += any(each is not self for each in self._under_way)
        self._under_way.append(self)
        return SimpleNamespace(wait=partial(self._wait, self._group._allgather_base(output, input)))

    def _wait(self, work: Any) -> None:
        work.wait()
        with suppress(ValueError):  # it was waited for before
            self._under_way.remove(self)


def test_a_ranks_groups_exchange_one_after_the_other_in_halves_too() -> None:
    comms: list[Any] = comms_of(3, attention_ranks=1, two_batches=True, library="gloo")
    watched = list[Watched]()
    for comm in comms[1:]:
        under_way = list[Watched]()
        for parts in (comm, comm.sharing):
            parts._group = Watched(parts._group, under_way)
            watched.append(parts._group)

    def step(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        def half(*groups: Any) -> torch.Tensor:
            return torch.stack([group.all_reduce(torch.ones(2)) for group in groups])

        return cast(
            "tuple[torch.Tensor, torch.Tensor]",
            comm.two_batches.run(partial(half, comm, comm.sharing), partial(half, comm.sharing, comm)),
        )

    with ThreadPoolExecutor(3) as threads:
        found = [each.result(60) for each in [threads.submit(step, comm) for comm in comms]]
    for first, second in found[1:]:
        assert first.tolist() == [[3.0] * 2, [2.0] * 2]
        assert second.tolist() == [[2.0] * 2, [3.0] * 2]
    assert [each.together for each in watched] == [0] * 4


@pytest.mark.parametrize(
    ("family", "size", "changes", "options"),
    [
        ("qwen2", 2, {}, {}),
        ("llama", 4, {"num_key_value_heads": 1, "vocab_size": 511}, {}),  # an uneven vocabulary
        ("llama", 2, {"intermediate_size": 128}, {"stages": 2}),
        ("llama", 2, {"intermediate_size": 128}, {"quantize": "int8"}),
    ],
)
def test_base_and_adapters_of_every_kind_answer_in_one_batch_as_in_one_process(
    family: str, size: int, changes: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    base = model_folder(family, **changes)
    made = adapters_of(base, tmp_path, EVERY_KIND)
    same_answers(base, size, made, tokens=64, library="gloo", **options)


def test_experts_in_groups_answer_as_in_one_process(tmp_path: Path) -> None:
    base = model_folder("qwen3_moe", num_experts=8, num_key_value_heads=2)
    made = adapters_of(base, tmp_path, ON_EXPERTS)
    same_answers(base, 2, made, tokens=64, library="gloo", expert_groups=2)


def test_ranks_as_processes_answer_as_one_process_does_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".pkg"))
    base = make_model_folder(tmp_path / "model", "llama")
    adapters = adapters_of(base, tmp_path, {"dora": EVERY_KIND["dora"]})
    expected = answers(Assembled(base, adapters), 64)
    made = Assembled(base, adapters, ranks=2, pipeline_parallel_size=2, dist_backend="gloo")
    try:
        assert answers(made, 64) == expected
        made.begin_epoch()
        assert answers(made, 64) == expected
    finally:
        made.end()


ENDING = """
import os, subprocess, sys, threading
from personae.engine.parallel.ranks import end_with
rank = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
over = threading.Event()
watching = threading.Thread(target=end_with, args=([rank], over))
watching.start()
if sys.argv[1] == "over":
    over.set()
    watching.join()
rank.kill()
rank.wait()
watching.join()
"""


@pytest.mark.parametrize(("when", "code"), [("running", 1), ("over", 0)])
def test_an_engine_on_gpus_ends_at_once_with_any_of_its_ranks_but_not_when_it_ends_them(
    when: str, code: int
) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDING, when], timeout=120, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert ("rank 1 of the model ended with exit code -9" in ended.stderr) == (code == 1)
