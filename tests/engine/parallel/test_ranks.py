"""The processes of ranks, as the first rank starts them."""

import re
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from failing_rank import failing_at
from patience import PATIENCE
from tiny_models import make_model_folder

from personae.engine.parallel import process_groups
from personae.engine.parallel import ranks as ranks_module
from personae.engine.parallel.messages import PoolSizes
from personae.engine.parallel.pipeline import Pipeline
from personae.engine.parallel.process_groups import Library
from personae.engine.parallel.ranks import RankEnded, Ranks
from personae.engine.plan import MemoryLayout
from personae.engine.worker.profiling import GpuMemory
from personae.errors import LoadError

SIZES = PoolSizes(MemoryLayout(8, 16, 2, 64, 32), "float32", 8, 0, 1)


@pytest.fixture(autouse=True)
def _single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3] / ".pkg"))


def ranks_of(model: Path, size: int, stages: int, library: Library | None = None) -> Ranks:
    return Ranks(
        model, size, stages, dtype="float32", quantize=None, max_position=64, threads=1, library=library
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("weights_digest", "It sees other weights than the first rank"),
        ("personae", "It has Personae .*, and the first rank has 0.0.0"),
    ],
)
def test_a_rank_that_has_other_weights_or_another_version_says_so_with_its_number(
    changed: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    other = {
        "weights_digest": lambda model: "of other files",
        "personae": SimpleNamespace(__version__="0.0.0"),
    }
    monkeypatch.setattr(ranks_module, changed, other[changed])
    ranks = ranks_of(folder, 1, 2)
    try:
        with pytest.raises(LoadError, match=f"rank 1: {said}"):
            ranks.loaded()
    finally:
        ranks.end()


def test_the_first_rank_notices_that_a_stage_has_ended(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", "llama")
    ranks = ranks_of(folder, 1, 2)
    try:
        ranks.loaded()
        [process] = ranks._processes
        process.kill()
        process.wait()
        assert isinstance(ranks.comm, Pipeline)
        with pytest.raises(RankEnded, match="rank 1 of the model ended with exit code -9"):
            ranks.comm.begin_receive(torch.empty(1, 64)).result()
    finally:
        ranks.end()


def test_a_rank_that_ends_before_all_have_joined_ends_the_start_at_once_with_its_number(
    tmp_path: Path,
) -> None:
    ranks = ranks_of(make_model_folder(tmp_path / "model", "llama"), 4, 1, "gloo")
    try:
        assert all(line.poll(PATIENCE) for line in ranks._lines if isinstance(line, Connection))  # they join
        ranks._processes[1].kill()
        with pytest.raises(
            LoadError, match="Rank 2 of the model ended with exit code -9 before it had joined"
        ):
            ranks.loaded()
        assert ranks._processes[0].poll() is not None
    finally:
        ranks.end()


LACKS = "Rank 1 of the model has too little memory to"


def load(ranks: Ranks) -> None:
    ranks.loaded()


def measure(ranks: Ranks) -> None:
    ranks.loaded()
    ranks.measured(None, lambda: _waiting_for_the_others(ranks))


def build(ranks: Ranks) -> None:
    ranks.loaded()
    ranks.build(SIZES)


def _waiting_for_the_others(ranks: Ranks) -> GpuMemory:
    ranks.comm.all_reduce(torch.ones(3))
    return GpuMemory(0, 0, 0)


@pytest.mark.parametrize(
    ("library", "function", "begin", "said"),
    [
        (None, "load_model", load, f"{LACKS} load its part."),
        ("gloo", "load_model", load, f"{LACKS} load its part."),
        ("gloo", "open_store", load, f"{LACKS} join the others."),
        (None, "_measured", measure, f"{LACKS} run a step to measure its memory."),
        ("gloo", "_measured", measure, f"{LACKS} run a step to measure its memory."),
        ("gloo", "_runner", build, f"{LACKS} allocate its caches."),
    ],
)
def test_a_rank_that_has_too_little_memory_at_the_start_says_for_what_with_its_number(
    library: Library | None,
    function: str,
    begin: Callable[[Ranks], None],
    said: str,
    tmp_path: Path,
) -> None:
    with failing_at(function, tmp_path):
        ranks = ranks_of(make_model_folder(tmp_path / "model", "qwen3_moe"), 2, 1, library)
    try:
        with pytest.raises(LoadError, match=f"^{re.escape(said)}$"):
            begin(ranks)
    finally:
        ranks.end()


def test_a_library_that_fails_at_the_start_says_why_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no network device\nwhere it is raised")

    monkeypatch.setattr(process_groups, "_new_group", fail)
    ranks = ranks_of(make_model_folder(tmp_path / "model", "llama"), 2, 1, "gloo")
    try:
        with pytest.raises(LoadError, match="The ranks of the model lost each other before all had joined"):
            ranks.loaded()
    finally:
        ranks.end()
    assert caplog.messages == ["an exchange between ranks failed: no network device"]
