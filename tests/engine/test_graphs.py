"""Decode steps as graphs: what is captured once serves every mix, from the same addresses."""

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness, Played
from msgspec.structs import replace
from recorded_graphs import REFUSED, RecordedGraphs, Recording, storage
from tiny_adapters import ZOO, make_adapter_folder
from tiny_models import model_folder

from personae.engine.config import read_config
from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.worker.graphs import DecodeGraphs, buckets, check
from personae.kernels import registry
from personae.lora.peft import read_adapter
from personae.lora.pool import LoraPool

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


def cast(harness: EngineHarness, names: list[str | None], tag: str, length: int = 5) -> list:
    return [
        harness.log(f"{tag}-{i}", [4 + i, *range(5, 4 + length)], name, max_tokens=14, salt=tag.encode())
        for i, name in enumerate(names)
    ]


def tokens(played: dict[str, Played]) -> dict[str, list[int]]:
    return {id: one.tokens for id, one in played.items()}


def pages(harness: EngineHarness) -> torch.Tensor:
    """The cache without its spare page."""
    kv = harness.engine.worker.kv
    return kv.data[:, :, : kv.num_pages]


def standing(harness: EngineHarness) -> set[int]:
    """The memory that stays where it is for as long as the engine lives."""
    runner = harness.engine.worker
    model, pool, graphs = runner.model, runner.adapters, runner.graphs
    assert graphs is not None
    weight_pools = [(stack.a, stack.b, stack.table.rank, stack.table.pages) for stack in pool.stacks.values()]
    return {
        storage(tensor)
        for tensor in (
            *(tensor for _, tensor in model.tensors()),
            *(table for layer in model.layers for table in layer.attention.rope or ()),
            runner.kv.data,
            *(tensor for each in weight_pools for tensor in each),
            *graphs.buffers,
        )
    }


MIXES: dict[str, list[str | None]] = {
    "at capture": ["rslora", "rslora", None],
    "more adapters": ["rank-1", "rank-8-attention", "rslora"],
    "fewer": [None, "rank-1", None],
    "none": [None, None, None],
    "as at capture": ["rslora", "rslora", None],
}


def test_one_graph_serves_fewer_and_more_adapters_than_it_was_captured_with(base, adapters, capture) -> None:
    eager = EngineHarness(base, adapters)
    graphs = EngineHarness(base, {name: adapters[name] for name in ("rslora", "rank-1")}, capture=capture)
    captured = []
    for tag, mix in MIXES.items():
        if tag == "more adapters":  # one comes after the capture
            name = "rank-8-attention"
            graphs.place(name, read_adapter(adapters[name], graphs.shapes))
        wanted = tokens(eager.play(cast(eager, mix, tag)))
        assert tokens(graphs.play(cast(graphs, mix, tag))) == wanted
        captured.append(len(capture.recordings))
    assert captured == [1, 1, 1, 2, 2]  # with adapters, and without any
    assert capture.replays == 5 * 13  # all but the prompts


def test_rows_come_and_go_and_unused_ones_touch_no_page(base, adapters, capture) -> None:
    # 7 rows and fewer share buckets; lengths differ, so rows end at different times and cross pages.
    eager, graphs = (
        EngineHarness(base, adapters, page_size=4),
        EngineHarness(base, adapters, page_size=4, capture=capture),
    )
    played = []
    for harness in (eager, graphs):
        logs = [
            replace(log, params=replace(log.params, max_tokens=3 + 2 * i))
            for i, log in enumerate(cast(harness, [*RANKS_ALONE, None, None, "rslora", "rank-1"], "x", 9))
        ]
        played.append(tokens(harness.play(logs)))
    assert played[0] == played[1]
    assert 1 < len(capture.recordings) < 8
    assert capture.replays > len(capture.recordings)
    assert torch.isnan(pages(graphs)).any()  # pages that nobody had
    torch.testing.assert_close(pages(graphs), pages(eager), equal_nan=True, rtol=1e-4, atol=1e-5)


def test_every_step_reads_and_writes_the_same_addresses_and_they_stay(base, adapters, capture) -> None:
    harness = EngineHarness(base, adapters, capture=capture)
    harness.play(cast(harness, ["rslora", None, None], "one"))
    graphs = harness.engine.worker.graphs
    assert graphs is not None
    graphs._graphs.clear()
    harness.play(cast(harness, ["rank-1", "rank-8-attention", "rslora"], "another", length=40))
    first, second = capture.recordings
    assert len(first.calls) > 20
    assert first.inputs() == second.inputs()
    assert first.outside() <= standing(harness)
    assert {storage(buffer) for buffer in graphs.buffers} <= first.outside()  # nothing is filled in vain


def test_a_prompt_of_one_token_is_a_step_like_any_other(base, adapters, capture) -> None:
    eager, graphs = EngineHarness(base, adapters), EngineHarness(base, adapters, capture=capture)
    found = [
        tokens(t.play([t.log("p", [7], "rslora", logprobs=2, prompt_logprobs=1), t.log("q", [9], None)]))
        for t in (eager, graphs)
    ]
    assert found[0] == found[1]
    assert capture.replays == 16


def test_an_adapter_that_is_more_than_ranks_runs_without_a_graph(base, tmp_path, capture) -> None:
    dora = {"dora": make_adapter_folder(tmp_path / "dora", base, use_dora=True)}
    eager, graphs = EngineHarness(base, dora), EngineHarness(base, dora, capture=capture)
    found = [tokens(t.play(cast(t, ["dora"], "d"))) for t in (eager, graphs)]
    assert found[0] == found[1]
    assert capture.recordings == []


class Failing:
    """A capture that does not work."""

    def __init__(self, recorded: RecordedGraphs, how: str) -> None:
        self.recorded, self.how, self.calls = recorded, how, 0

    def __call__(self, work: Any) -> Any:
        self.calls += 1
        if self.how == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        replay, hidden = self.recorded(work)
        if self.how == "does nothing":
            return hidden.zero_, hidden
        frozen: list[torch.Tensor] = []

        def stale() -> None:  # right the first time, and then that again
            if not frozen:
                replay()
                frozen.append(hidden.clone())
            hidden.copy_(frozen[0])

        return stale, hidden


@pytest.mark.parametrize("how", ["raises", "does nothing", "repeats itself"])
def test_a_graph_that_fails_or_lies_is_found_out_and_the_step_runs_without(
    how: str, base, adapters, capture, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing(capture, how)
    eager, graphs = EngineHarness(base, adapters), EngineHarness(base, adapters, capture=failing)
    with caplog.at_level(logging.WARNING, "personae.engine"):
        for tag, mix in MIXES.items():
            wanted = tokens(eager.play(cast(eager, mix, tag)))
            assert tokens(graphs.play(cast(graphs, mix, tag))) == wanted
    assert failing.calls == 1
    (record,) = caplog.records
    assert "CUDA graphs are off" in record.getMessage()


def test_rows_are_compared_one_by_one_and_nan_with_nan() -> None:
    truth = torch.tensor([[1000.0, 2.0], [1.0, 2.0], [torch.nan, 1.0]])
    check(truth.clone(), truth)
    for row, value in ((1, 3.0), (1, torch.nan), (2, 1.0)):
        wrong = truth.clone()
        wrong[row, 0] = value
        with pytest.raises(ArithmeticError):
            check(wrong, truth)


@pytest.mark.parametrize("mistake", [lambda x: x.sum().item(), lambda x: torch.tensor([1.0]) + x])
def test_the_recorder_refuses_what_a_graph_cannot_hold(mistake) -> None:
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="no place in a captured graph"):
        RecordedGraphs()(lambda: mistake(x) + x)


def test_the_recorder_sees_memory_that_does_not_stay_and_what_is_left_over() -> None:
    graphs, weight = RecordedGraphs(), torch.ones(3)
    passing = torch.ones(3)
    graphs(lambda: weight + passing)
    assert graphs.recordings[0].outside() == {storage(weight), storage(passing)}
    replay, result = graphs(lambda: torch.empty(3).add_(0 * weight))  # reads what nobody wrote
    replay()
    assert torch.isnan(result).all()


@pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton"
)
@pytest.mark.parametrize("adapted", [False, True])
def test_the_pass_with_the_real_operators_needs_no_value_from_the_device(
    base, adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On the meta device there are no values: whoever asks for one fails. Launches are listed instead.
    from triton_aot import launches

    from personae.kernels.triton.calls import TritonOperators
    from personae.kernels.triton.sizes import Gpu

    operators = TritonOperators(Gpu(132, hopper=True)).by_name()
    own = {name: registry.Implementation(run) for name, run in operators.items()}
    monkeypatch.setattr(registry, "operators", lambda _backend: own)
    monkeypatch.setitem(registry.BACKENDS, "meta", ("triton",))
    meta, layout = torch.device("meta"), MemoryLayout(64, 16, 8, 1024, 512)
    config = read_config(base)
    model = Decoder(config, dtype=torch.bfloat16, device=meta)
    shapes = EngineHarness(base).shapes
    pool = LoraPool(shapes, capacity_rows=64, max_adapters=4, dtype=torch.bfloat16, device=meta)
    kv = KVCache(config.kv_specs, layout, torch.bfloat16, meta, spare=True)
    graphs = DecodeGraphs(model, kv, pool, layout, RecordedGraphs())
    with launches() as launched, Recording() as recording:
        hidden = graphs._forward(6, adapted)
    assert hidden.shape == (6, config.hidden_size)
    names = [launch.kernel.__name__ for launch in launched]
    layers = config.layers
    expected = {"attention_kernel": 1, "merge_kernel": 1, "append_kv_kernel": 1, "rotary_kernel": 1}
    for name, count in {**expected, "act_and_mul_kernel": 1, "rms_norm_kernel": 4}.items():
        assert names.count(name) == count * layers, name
    for name, count in {"plan_kernel": 4, "shrink_kernel": 4 * layers, "expand_kernel": 4 * layers}.items():
        assert names.count(name) == count * adapted, name
    assert not REFUSED & {call.name for call in recording.calls}


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
    from personae.engine.worker.graphs import CudaCapture

    eager = EngineHarness(base, adapters, device="cuda")
    graphs = EngineHarness(base, adapters, device="cuda", capture=CudaCapture())
    for tag, mix in MIXES.items():
        wanted = tokens(eager.play(cast(eager, mix, tag)))
        assert tokens(graphs.play(cast(graphs, mix, tag))) == wanted
