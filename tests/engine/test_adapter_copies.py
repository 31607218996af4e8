"""A step of adapters that are on their way waits for what it reads, layer by layer, and for no more."""

from pathlib import Path

import pytest
import torch
from engine_harness import EngineHarness, Played
from late_copies import LateCopies, LateEvent
from recorded_graphs import RecordedGraphs
from tiny_adapters import make_adapter_folder, make_zoo
from tiny_models import model_folder

from personae.kernels import registry
from personae.lora.peft import read_adapter
from personae.lora.segments import LoraBatch
from personae.lora.writing import made_ready

NAMES = ("rank-8-attention", "rslora", "rank-64", "rank-pattern")
MIX = (*NAMES, None, NAMES[1])


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_zoo(tmp_path_factory.mktemp("adapters"), base, NAMES)


def poison(harness: EngineHarness) -> None:
    """What has not been written shows."""
    for stack in harness.engine.worker.adapters.stacks.values():
        stack.a.fill_(torch.nan)
        stack.b.fill_(torch.nan)


def answers(harness: EngineHarness) -> dict[str, Played]:
    logs = [
        harness.log(f"{i}", [4 + i, *range(5, 25)], name, max_tokens=12, logprobs=1)
        for i, name in enumerate(MIX)
    ]
    return harness.play(logs)


def test_answers_are_those_of_adapters_that_were_there_and_each_layer_waits_for_itself(
    base: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = answers(EngineHarness(base, adapters))
    copies = LateCopies()
    cold = EngineHarness(base, copies=copies)
    poison(cold)
    for name, path in adapters.items():
        cold.place(name, read_adapter(path, cold.shapes))
    assert copies.arrived == 0 < len(copies)
    seen: list[tuple[int, int]] = []
    begin = LoraBatch.begin

    def noted(self, layer, group, x):  # type: ignore[no-untyped-def]  # as the original
        finish = begin(self, layer, group, x)
        return lambda ys: (finish(ys), seen.append((layer, copies.arrived)))

    monkeypatch.setattr(LoraBatch, "begin", noted)
    found = answers(cold)
    assert {id: one.tokens for id, one in found.items()} == {id: one.tokens for id, one in truth.items()}
    for id, one in found.items():
        for mine, theirs in zip(one.logprobs, truth[id].logprobs, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
    first = dict(reversed(seen[: 4 * cold.shapes.layers]))
    last = first[cold.shapes.layers - 1]
    assert first[0] < last == len(copies), "the first layers began before the last had come"


def test_without_the_waits_the_answers_would_be_others(
    base: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LateEvent, "wait", lambda mark: None)
    cold = EngineHarness(base, copies=LateCopies())
    poison(cold)
    for name, path in adapters.items():
        cold.place(name, read_adapter(path, cold.shapes))
    assert any(one.error for one in answers(cold).values())


def test_graphs_wait_until_all_has_arrived_and_are_used_then(
    base: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = RecordedGraphs()
    monkeypatch.setattr(registry, "operators", capture.operators)
    truth = answers(EngineHarness(base, adapters))
    monkeypatch.setattr(LateEvent, "reached", property(lambda mark: False))
    slow = EngineHarness(base, copies=LateCopies(), capture=capture)
    for name, path in adapters.items():
        slow.place(name, read_adapter(path, slow.shapes))
    assert {id: one.tokens for id, one in answers(slow).items()} == {id: p.tokens for id, p in truth.items()}
    assert not capture.replays, "nobody knew that they had arrived"
    monkeypatch.setattr(LateEvent, "reached", property(lambda mark: True))
    answers_again = slow.play([slow.log("again", range(5, 25), NAMES[0], max_tokens=12)])
    assert answers_again["again"].finish == "length"
    assert capture.replays


def test_pages_that_change_hands_on_the_way_are_the_last_one_s(base: Path, adapters: dict[str, Path]) -> None:
    copies = LateCopies()
    harness = EngineHarness(base, copies=copies)
    pool = harness.engine.worker.adapters
    shapes = harness.shapes
    first, second = (read_adapter(adapters[name], shapes) for name in ("rank-64", "rank-8-attention"))
    pool.load(first)
    pool.unload(first.digest)
    assert copies.arrived == 0
    harness.place("second", second)
    warm = EngineHarness(base, {"second": adapters["rank-8-attention"]})
    logs = [each.log("one", range(5, 25), "second") for each in (harness, warm)]
    assert harness.play([logs[0]])["one"].tokens == warm.play([logs[1]])["one"].tokens
    begins = [place for place, entry in enumerate(copies.log) if entry == "begin"]
    assert begins[0] == 0
    assert copies.log[begins[1] - 1] == "mark", "each load waits for steps that may read what it overwrites"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_made_ready_when_it_was_read_is_on_the_device_bit_for_bit(
    base: Path, adapters: dict[str, Path], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = str(dtype).removeprefix("torch.")
    plain, copies = EngineHarness(base, adapters, dtype=name), LateCopies()
    prepared = EngineHarness(base, dtype=name, copies=copies)
    poison(prepared)
    for path in adapters.values():
        read = read_adapter(path, prepared.shapes)
        ready = made_ready(read, dtype, copies.host)
        assert (ready.digest, ready.ranks, ready.peak) == (read.digest, read.ranks, read.peak)
        assert ready.nbytes == read.nbytes * dtype.itemsize // 4
        with monkeypatch.context() as patch:
            patch.setattr(copies, "host", None)  # there is nothing left to be done on the host
            assert prepared.engine.worker.place(ready)
    copies.arrive(len(copies))
    pools = [harness.engine.worker.adapters for harness in (plain, prepared)]
    for module, stack in pools[0].stacks.items():
        other = pools[1].stacks[module]
        for slot in range(len(adapters)):
            rows = stack.table.rows(slot)
            assert torch.equal(rows, other.table.rows(slot))
            padded = rows[: -(-len(rows) // 8) * 8]
            assert torch.equal(stack.a[:, padded], other.a[:, padded])
            assert torch.equal(stack.b[:, padded], other.b[:, padded])
    pools[1].check_integrity()


def test_an_adapter_whose_b_depends_on_the_base_is_made_ready_when_it_is_placed(
    base: Path, tmp_path: Path
) -> None:
    name = "dora"
    path = make_adapter_folder(tmp_path / name, base, rank=8, seed=9, use_dora=True)
    warm = EngineHarness(base, {name: path})
    copies = LateCopies()
    cold = EngineHarness(base, copies=copies)
    poison(cold)
    read = read_adapter(path, cold.shapes)
    assert made_ready(read, torch.float32, copies.host) is read
    cold.place(name, read)
    logs = [each.log("one", range(5, 25), name) for each in (cold, warm)]
    assert cold.play([logs[0]])["one"].tokens == warm.play([logs[1]])["one"].tokens
