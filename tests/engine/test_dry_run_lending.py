"""Adapters and the KV cache share a GPU's memory, on one made of paper: what is lent has no memory behind its
addresses, steps and copies are late, and graphs are replayed across it all."""

import os
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available(),
    reason="needs Triton's compiler, and no GPU",
)
from dry_engine import DryEngine  # noqa: E402  # below the mark, which says what they need
from engine_harness import EngineHarness  # noqa: E402
from marks import long  # noqa: E402
from paper_gpu import Late, Mistake, PaperGpu  # noqa: E402
from tiny_adapters import make_adapter_folder  # noqa: E402
from tiny_models import model_folder  # noqa: E402

from personae.engine.worker import adapters as adapter_memory  # noqa: E402
from personae.kernels.registry import reference_only  # noqa: E402
from personae.lora import copies  # noqa: E402

GRANULE = 1 << 15  # two pages of the KV cache
SIZES = {"dtype": "float32", "max_seqs": 4, "max_batch_tokens": 64, "max_model_len": 128}
NAMES = tuple("abcd")
PAGES = 64


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        make_adapter_folder(root / name, base, rank=32, seed=seed)
    return root


def logs(engine: DryEngine | EngineHarness, name: str | None) -> list:
    return [engine.log(f"{name} {i}", [7 + i, *range(40, 40 + 30 * i)], name, max_tokens=6) for i in range(2)]


def load(engine: DryEngine | EngineHarness) -> list:
    """Sequences that take half of the cache, of different prompts."""
    return [engine.log(f"base {i}", [*range(i, i + 100)], max_tokens=20, ignore_eos=True) for i in range(4)]


@pytest.fixture(scope="module")
def truth(base: Path, adapters: Path) -> dict[str, list[int]]:
    with reference_only():
        harness = EngineHarness(base, {path.name: path for path in adapters.iterdir()})
        asked = [*(log for name in (*NAMES, None) for log in logs(harness, name)), *load(harness)]
        return {id: one.tokens for id, one in harness.play(asked).items()}


def lending_engine(gpu: PaperGpu, base: Path, adapters: Path) -> DryEngine:
    """With memory for one adapter, plus what it borrows."""
    engine = DryEngine(
        gpu, base, adapters, kv_memory=PAGES * 16384, adapter_memory=290_000, cuda_graphs=True, **SIZES
    )
    assert engine.layout.run == 2
    assert engine.layout.lendable == PAGES // 2
    return engine


def place(engine: DryEngine, name: str) -> None:
    """As the executor does."""
    adapter = engine.adapter(name)
    if missing := engine.engine.worker.short_of(adapter):
        pages = engine.scheduler.lend(missing)
        for _ in engine.engine.worker.lending(pages):
            pass
    engine.place(name)


def recall(engine: DryEngine, count: int) -> int:
    """As the executor does; how many pages came back."""
    pages = engine.engine.worker.recall(count)
    for _ in engine.engine.worker.returning(pages):
        pass
    engine.scheduler.returned(pages)
    engine.scheduler.check_integrity()
    return len(pages)


def lending_to_and_fro(late: Late, base: Path, adapters: Path) -> dict[str, list[int]]:
    """All answers, in two rounds of adapters that come, and sequences that want the memory back."""
    found: dict[str, list[int]] = {}
    with PaperGpu(24 << 20, late=late, granule=GRANULE) as gpu:
        engine = lending_engine(gpu, base, adapters)
        assert gpu.driver is not None
        mapped, pool = gpu.driver.held, engine.engine.worker.adapters
        ready = set(gpu.machine.compiled)
        for _ in range(2):
            for name in NAMES:
                place(engine, name)
                found |= {id: one.tokens for id, one in engine.play(logs(engine, name)).items()}
                engine.engine.worker.release(engine.cards[name].adapter or "")
                pool.check_integrity()
                assert gpu.driver.held <= mapped + pool.budget
            assert engine.scheduler.pages_lent > 0
            assert len(engine.held) > 1
            lent = engine.scheduler.pages_lent
            assert recall(engine, lent // 2) >= lent // 2
            found |= {id: one.tokens for id, one in engine.play([*logs(engine, None), *load(engine)]).items()}
            recall(engine, PAGES)
            assert engine.scheduler.pages_lent == 0
        assert engine.engine.worker.adapter_stats[2] > 0
        assert gpu.machine.compiled == ready
        graphs = engine.engine.worker.graphs
        assert graphs is not None
        assert graphs._capture is not None, "graphs were given up"
    return found


@pytest.mark.parametrize("late", [Late.ALL, long(Late.MAIN), long(Late.SIDE)])
def test_answers_are_those_of_a_cpu_while_memory_goes_to_and_fro(late: Late, base, adapters, truth) -> None:
    assert lending_to_and_fro(late, base, adapters) == truth


def taken_from_a_step_in_flight(what: str, base: Path, adapters: Path) -> list[int]:
    """What a step of adapter a samples that is late, when its pages are lent or its adapter leaves."""
    with PaperGpu(24 << 20, granule=GRANULE) as gpu:
        engine = lending_engine(gpu, base, adapters)
        core, digest = engine.engine, engine.cards["a"].adapter
        assert digest is not None
        for graph in core.worker.graphs._graphs.values():
            graph.trials = 0  # one on trial waits for its step
        for name in "ba":  # the first granules stay, so another has those
            place(engine, name)
        torch.cuda.synchronize()
        engine.scheduler.add(logs(engine, "a")[1])
        plan = engine.scheduler.plan()
        assert plan is not None
        launched = core.sample(plan, core.forward(core.prepare(plan, {})))
        if what == "pages":
            taken = core.worker.lending(plan.rows[0].pages[: engine.layout.run])
        else:
            core.worker.release(digest)
            core.worker.adapters.unload(digest)
            taken = core.worker.returning(())
        for _ in taken:
            pass
        return [token for row in core.finish(launched).tokens for token in row]


@pytest.mark.parametrize("what", ["pages", "adapter"])
def test_memory_is_taken_from_a_step_in_flight_when_that_is_done(what: str, base, adapters, truth) -> None:
    assert taken_from_a_step_in_flight(what, base, adapters) == truth["a 1"][:1]


def pages_at_once(patch: pytest.MonkeyPatch) -> None:
    class Reached(adapter_memory.DeviceToHostEvent):
        reached = True

    patch.setattr(adapter_memory, "DeviceToHostEvent", Reached)


def adapters_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(copies.StreamCopies, "begin", lambda self: None)


@pytest.mark.parametrize(("what", "mistake"), [("pages", pages_at_once), ("adapter", adapters_at_once)])
def test_memory_that_is_taken_too_early_is_noticed(
    what: str, mistake, base, adapters, truth, monkeypatch
) -> None:
    mistake(monkeypatch)
    found = None
    with suppress(Mistake):  # what is written too late; what is read too late is another answer
        found = taken_from_a_step_in_flight(what, base, adapters)
    assert found != truth["a 1"][:1]


def test_a_gpu_without_the_driver_serves_with_fixed_shares_and_says_so(base, adapters, truth, caplog) -> None:
    with PaperGpu(24 << 20) as gpu:
        engine = DryEngine(gpu, base, adapters, kv_memory=PAGES * 16384, adapter_memory=290_000, **SIZES)
        assert engine.layout.lendable == 0
        for name in NAMES[:2]:
            place(engine, name)
            found = engine.play(logs(engine, name))
            assert {id: one.tokens for id, one in found.items()}.items() <= truth.items()
            engine.engine.worker.release(engine.cards[name].adapter or "")
        assert len(engine.held) == 1
    assert [r.levelname for r in caplog.records if "fixed shares" in r.message] == ["WARNING"]


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_driver_that_fails_at_the_start_leaves_fixed_shares(
    call: str, base, adapters, truth, caplog
) -> None:
    with PaperGpu(24 << 20, granule=GRANULE) as gpu:
        assert gpu.driver is not None
        gpu.driver.fails.add(call)
        engine = DryEngine(gpu, base, adapters, kv_memory=PAGES * 16384, adapter_memory=290_000, **SIZES)
        for name in NAMES[:2]:
            assert not engine.engine.worker.short_of(engine.adapter(name))
            place(engine, name)
            found = engine.play(logs(engine, name))
            assert {id: one.tokens for id, one in found.items()}.items() <= truth.items()
            engine.engine.worker.release(engine.cards[name].adapter or "")
        assert len(engine.held) == 1
    warnings = [r.message for r in caplog.records if "fixed shares" in r.message]
    assert len(warnings) == 1
    assert call in warnings[0]
