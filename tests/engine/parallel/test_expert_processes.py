"""Mixtures of experts in groups of real processes: as one process answers, while experts move, and when one
of the processes is killed."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from assembled import Assembled
from crash_harness import play_all, same
from family_models import make_family_folder
from marks import long
from patience import PATIENCE, soon
from shared_model import ON_EXPERTS, adapters_of, answers

from personae.actors.multi_process import open_multi_process
from personae.actors.options import EngineOptions
from personae.engine.params import SamplingParams
from personae.engine.sequence import SequenceLog
from personae.engine.worker import expert_balancing

# PEFT warns that rank_pattern's key for experts matches no module, and then applies it to the parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
TWO = {name: ON_EXPERTS[name] for name in ("both", "down")}
APART = {
    "tensor_parallel_size": 3,
    "enable_dp_attention": True,
    "attention_ranks": 1,
    "enable_two_batch_overlap": True,
}
"""The engine core's process has attention, and two others the experts."""


@pytest.fixture(autouse=True)
def _single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3] / ".pkg"))


@contextmanager
def processes(*asked: object, **options: object) -> Iterator[Assembled]:
    made = Assembled(*asked, **options)  # type: ignore[arg-type]  # its own arguments
    try:
        yield made
    finally:
        made.end()


def test_experts_that_move_between_processes_answer_as_one_process_does_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_balancing, "BALANCE_STEPS", 4)
    base = make_family_folder(tmp_path / "model", "glm4_moe")  # whose router chooses among groups of experts
    adapters = adapters_of(base, tmp_path, TWO)
    expected = answers(Assembled(base, adapters), 64)
    with processes(base, adapters, ranks=2, expert_parallel_size=2, enable_eplb=True) as made:
        assert answers(made, 64) == expected
        assert made.scheduler.counters.expert_moves
        made.begin_epoch()  # the first rank's experts have moved, and the other ranks' processes are new
        assert answers(made, 64) == expected


def test_attention_and_experts_in_different_processes_answer_as_one_process_does_in_each_epoch(
    tmp_path: Path,
) -> None:
    base = make_family_folder(tmp_path / "model", "glm4_moe")
    adapters = adapters_of(base, tmp_path, TWO)
    expected = answers(Assembled(base, adapters), 64)
    asked = {"ranks": 3, "expert_parallel_size": 2, **APART}
    del asked["tensor_parallel_size"]
    with processes(base, adapters, **asked) as made:
        assert answers(made, 64) == expected
        made.begin_epoch()
        assert answers(made, 64) == expected


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
@pytest.mark.parametrize(
    ("case", "changes", "killed"),
    [
        ("qwen2_moe", {"enable_eplb": True}, "other"),  # with shared experts
        long("deepseek_v3", {"enable_eplb": True, "enable_dp_attention": True}, "other"),  # latent attention
        long("qwen2_moe", APART, "other"),
        ("qwen2_moe", APART, "core"),
        long("qwen2_moe", {"dist_backend": "gloo"}, "other"),
        long("qwen2_moe", {"dist_backend": "gloo", **APART}, "other"),
    ],
)
async def test_streams_continue_token_for_token_when_a_rank_is_killed(
    case: str, changes: dict[str, Any], killed: str, tmp_path: Path
) -> None:
    base = make_family_folder(tmp_path / "model", case)
    made = adapters_of(base, tmp_path, TWO if case == "qwen2_moe" else {})
    options = EngineOptions(
        base,
        named_adapters=tuple(made.items()),
        device="cpu",
        dtype="float32",
        max_seqs=8,
        kv_memory=2**22,
        **{"tensor_parallel_size": 2, "expert_parallel_size": 2, **changes},
    )
    async with open_multi_process(options, max_restarts=20) as engines:
        client = engines.client
        digests = [card.adapter for card in client.models("default").values()]
        logs = [
            [
                SequenceLog(
                    f"{number}",
                    tuple(range(5 + number, 25)),
                    20 - number,
                    SamplingParams(max_tokens=150, seed=number, temperature=0.9 * (number % 2)),
                    adapter=digests[number % len(digests)],
                )
            ]
            for number in range(6)
        ]
        with anyio.fail_after(PATIENCE):
            calm = await play_all(client, logs)
            [core] = _children(os.getpid(), r"personae\.actors\.enginecore")
            other, *_ = _children(core, r"personae\.engine\.parallel")

            async def kill() -> None:
                await soon(lambda: client.stats().running > 2, "some streams have begun")
                os.kill(other if killed == "other" else core, signal.SIGKILL)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill)
                disturbed = await play_all(client, logs)
            assert client.stats().restarts == 1
            assert same(calm, disturbed)


def _children(of: int, command: str) -> list[int]:
    """The process ids of a process's children with such a command."""
    found = subprocess.run(
        ["pgrep", "-P", str(of), "-f", command], capture_output=True, text=True, timeout=PATIENCE
    )
    return [int(line) for line in re.findall(r"\d+", found.stdout)]
