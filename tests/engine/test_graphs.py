"""Decode steps as graphs: what is captured once serves every mix, from the same addresses."""

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from recorded_graphs import RecordedGraphs
from tiny_adapters import ZOO, make_adapter_folder
from tiny_models import model_folder
from troupe import Troupe

from personae.engine.graphs import buckets
from personae.kernels import registry
from personae.lora.peft import read_adapter

RANKS_ALONE = ("rank-8-attention", "rslora", "rank-1")


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter_folder(root / name, base, **ZOO[name]) for name in RANKS_ALONE}


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    graphs = RecordedGraphs()
    monkeypatch.setattr(registry, "operators", graphs.operators)
    return graphs


def cast(troupe: Troupe, names: list[str | None], tag: str, length: int = 5) -> list:
    return [
        troupe.log(f"{tag}-{i}", [4 + i, *range(5, 4 + length)], name, max_tokens=14, salt=tag.encode())
        for i, name in enumerate(names)
    ]


MIXES: dict[str, list[str | None]] = {
    "at capture": ["rslora", "rslora", None],
    "more adapters": ["rank-1", "rank-8-attention", "rslora"],
    "fewer": [None, "rank-1", None],
    "none": [None, None, None],
    "as at capture": ["rslora", "rslora", None],
}


def test_one_graph_serves_fewer_and_more_adapters_than_it_was_captured_with(base, adapters, capture) -> None:
    eager = Troupe(base, adapters)
    graphs = Troupe(base, {name: adapters[name] for name in ("rslora", "rank-1")}, capture=capture)
    captured = []
    for tag, mix in MIXES.items():
        if tag == "more adapters":  # one comes after the capture
            name = "rank-8-attention"
            graphs.place(name, read_adapter(adapters[name], graphs.shapes))
        wanted = {id: one.tokens for id, one in eager.play(cast(eager, mix, tag)).items()}
        assert {id: one.tokens for id, one in graphs.play(cast(graphs, mix, tag)).items()} == wanted
        captured.append(len(capture.recordings))
    assert captured == [1, 1, 1, 2, 2]  # with adapters, and without any
    assert capture.replays == 5 * 13  # all but the prompts


def test_rows_come_and_go_and_unused_ones_touch_nothing(base, adapters, capture) -> None:
    # 5, 6, 7 rows share buckets; lengths differ, so rows end at different times and cross pages.
    eager, graphs = Troupe(base, adapters, page_size=4), Troupe(base, adapters, page_size=4, capture=capture)
    played = []
    for troupe in (eager, graphs):
        logs = [
            replace(log, params=replace(log.params, max_tokens=3 + 2 * i))
            for i, log in enumerate(cast(troupe, [*RANKS_ALONE, None, None, "rslora", "rank-1"], "x", 9))
        ]
        played.append({id: one.tokens for id, one in troupe.play(logs).items()})
    assert played[0] == played[1]
    assert 1 < len(capture.recordings) < 8
    assert capture.replays > len(capture.recordings)


def test_every_step_reads_and_writes_the_same_addresses(base, adapters, capture) -> None:
    troupe = Troupe(base, adapters, capture=capture)
    troupe.play(cast(troupe, ["rslora", None, None], "one"))
    graphs = troupe.engine.runner.graphs
    graphs._captured.clear()
    troupe.play(cast(troupe, ["rank-1", "rank-8-attention", "rslora"], "another", length=40))
    first, second = (recording.inputs() for recording in capture.recordings)
    assert len(first) > 20
    assert first == second


def test_an_adapter_that_is_more_than_ranks_runs_without_a_graph(base, tmp_path, capture) -> None:
    dora = {"dora": make_adapter_folder(tmp_path / "dora", base, use_dora=True)}
    eager, graphs = Troupe(base, dora), Troupe(base, dora, capture=capture)
    found = [{id: p.tokens for id, p in t.play(cast(t, ["dora"], "d")).items()} for t in (eager, graphs)]
    assert found[0] == found[1]
    assert capture.recordings == []


@pytest.mark.parametrize("mistake", [lambda x: x.sum().item(), lambda x: torch.tensor([1.0]) + x])
def test_the_recorder_refuses_what_a_graph_cannot_hold(mistake) -> None:
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="no place in a captured graph"):
        RecordedGraphs()(lambda: (x, mistake(x)))


def test_buckets_are_few_and_less_than_half_too_large() -> None:
    for most in (1, 2, 5, 64, 100, 256):
        sizes = buckets(most)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == most
        for rows in range(1, most + 1):
            assert min(size for size in sizes if size >= rows) < 1.5 * rows
    assert len(buckets(256)) < 18


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graphs_choose_what_kernels_launched_one_by_one_choose(base, adapters) -> None:
    from personae.engine.graphs import CudaCapture

    eager = Troupe(base, adapters, device="cuda")
    graphs = Troupe(base, adapters, device="cuda", capture=CudaCapture())
    for tag, mix in MIXES.items():
        wanted = {id: one.tokens for id, one in eager.play(cast(eager, mix, tag)).items()}
        assert {id: one.tokens for id, one in graphs.play(cast(graphs, mix, tag)).items()} == wanted
