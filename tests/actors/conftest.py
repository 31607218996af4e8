"""What tests with engine cores in processes of their own share."""

from pathlib import Path

import pytest

from personae.actors.frontend.engine_process import EngineProcess
from personae.actors.options import EngineOptions


@pytest.fixture
def single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that the test starts."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2] / ".pkg"))


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    from crash_harness import with_adapters  # PEFT and transformers, which most tests here do without
    from tiny_models import model_folder

    root = tmp_path_factory.mktemp("adapters")
    return with_adapters(root, model_folder("qwen3"), max_seqs=8, kv_memory=2**22)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The process ids of all engine cores that were started, in order."""
    started: list[int] = []
    load = EngineProcess._load

    async def noted(self: EngineProcess) -> None:
        started.append(self._process.pid)
        await load(self)

    monkeypatch.setattr(EngineProcess, "_load", noted)
    return started
