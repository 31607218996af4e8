"""Decode steps as graphs: what is captured once serves every mix, from the same addresses."""

import logging
import os
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness, Played
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from recorded_graphs import REFUSED, RecordedGraphs, Recording, storage
from tiny_adapters import make_adapter_folder, make_zoo
from tiny_models import model_folder

from personae.engine.config_file import read_config
from personae.engine.kv import KVCache
from personae.engine.models.decoder import Decoder
from personae.engine.plan import MemoryLayout
from personae.engine.speculation.policy import Always
from personae.engine.worker.buckets import FEW_TOKENS, MOST_TOKENS, ROW_TOKENS, Bucket, Buckets
from personae.engine.worker.graphs import DecodeGraphs
from personae.engine.worker.step_graphs import Copies, check
from personae.kernels import registry
from personae.lora.peft import read_adapter
from personae.lora.pool import LoraPool

VIEWS = {"aten::slice", "aten::view", "aten::select", "aten::alias", "aten::detach"}
RANKS_ALONE = ("rank-8-attention", "rslora", "rank-1")


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_zoo(tmp_path_factory.mktemp("adapters"), base, RANKS_ALONE)


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
    assert captured == [2, 2, 2, 4, 4]  # of short prompts and of decode, with adapters and without any
    assert capture.replays == 5 * 14


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


def guessed(harness: EngineHarness, names: list[str | None], tag: str) -> list:
    """Rows that repeat themselves, so that they have drafts, and one that has none."""
    return [
        harness.log(f"{tag}-{i}", [7 + i, 8, 9] * 5, name, max_tokens=20, salt=tag.encode(), speculate=i != 1)
        for i, name in enumerate(names)
    ]


def test_drafts_of_rows_with_adapters_are_computed_by_graphs_that_serve_any_mix(
    base, adapters, capture
) -> None:
    eager = EngineHarness(base, adapters, policy=Always(), page_size=4)
    graphs = EngineHarness(base, adapters, policy=Always(), page_size=4, capture=capture)
    for tag, mix in MIXES.items():
        wanted = tokens(eager.play(guessed(eager, mix, tag)))
        assert tokens(graphs.play(guessed(graphs, mix, tag))) == wanted
    assert eager.steps == graphs.steps
    assert eager.scheduler.counters.accepted_tokens > 10
    assert capture.replays == graphs.steps - len(MIXES), "all but the last of each mix, which has no rows"
    several = [key for key in graphs.engine.worker.graphs._graphs if key[0].row_tokens > 1]
    assert 2 <= len(several) <= 8, "four sizes, with adapters and without, whatever the mix"
    assert len(capture.recordings) == len(graphs.engine.worker.graphs._graphs), "none is captured twice"
    torch.testing.assert_close(pages(graphs), pages(eager), equal_nan=True, rtol=1e-4, atol=1e-5)


def test_an_adapter_that_is_active_from_within_a_row_on_is_so_in_a_graph(
    base, adapters, tmp_path, capture
) -> None:
    invoked = make_adapter_folder(tmp_path / "invoked", base, rank=8, alora_invocation_tokens=[9, 10])
    both = {"invoked": invoked, "rslora": adapters["rslora"]}
    prompts = {"a": [5, 6, 7, 9, 10, 11, 12], "b": [8, 9, 10, 4], "c": [4, 5, 6]}
    found = []
    for made in (EngineHarness(base, both), EngineHarness(base, both, capture=capture)):
        names = {"a": "invoked", "b": "invoked", "c": "rslora"}
        logs = [made.log(id, tokens, names[id], max_tokens=9) for id, tokens in prompts.items()]
        assert [log.adapter_start for log in logs] == [3, 1, 0]
        found.append((tokens(made.play(logs)), made.steps))
    assert found[0] == found[1]
    assert capture.replays == found[1][1] - 1, "all but the last, which has no rows"


def test_every_step_reads_and_writes_the_same_addresses_and_they_stay(base, adapters, capture) -> None:
    harness = EngineHarness(base, adapters, capture=capture)
    harness.play(cast(harness, ["rslora", None, None], "one"))
    graphs = harness.engine.worker.graphs
    assert graphs is not None
    graphs._graphs.clear()
    harness.play(cast(harness, ["rank-1", "rank-8-attention", "rslora"], "another", length=40))
    several, first, second = capture.recordings
    assert len(first.calls) > 20
    assert first.inputs() == second.inputs()
    assert first.outside() | several.outside() <= standing(harness)
    assert {storage(buffer) for buffer in graphs.buffers} <= first.outside()  # nothing is filled in vain


def test_a_step_is_told_to_its_graph_in_two_launches(base, adapters, capture, monkeypatch) -> None:
    harness = EngineHarness(base, adapters, capture=capture)
    graphs, launches, fill = harness.engine.worker.graphs, list[list[str]](), DecodeGraphs._fill

    def filling(self, step, size) -> None:
        with Recording() as recording:
            fill(self, step, size)
        launches.append([call.name for call in recording.calls if call.name not in VIEWS])

    monkeypatch.setattr(DecodeGraphs, "_fill", filling)
    harness.play(cast(harness, ["rslora", "rank-1", None], "x"))
    assert graphs is not None
    of_prompts, *decode = launches
    assert of_prompts == ["aten::full_like", "aten::_foreach_copy_", "aten::copy_"]  # once for each bucket
    assert decode == [["aten::_foreach_copy_", "aten::copy_"]] * 13, "before, these were 16"


def test_copies_that_are_made_in_one_launch_have_one_type_and_the_same_strides() -> None:
    # What torch's foreach kernel asks for; else it makes them one by one.
    copies, buffer = Copies(), torch.zeros(6, dtype=torch.int64)
    copies.padded(buffer, torch.tensor([2**40, 7]), torch.full((6,), 5), 4)
    copies.add(torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32))
    pairs = list(zip(copies._targets, copies._sources, strict=True))
    assert len(pairs) == 3
    for target, source in pairs:
        assert target.dtype is source.dtype is torch.int32
        assert (target.shape, target.stride()) == (source.shape, source.stride()) == (target.shape, (1,))
    copies.launch()
    assert buffer.tolist() == [2**40, 7, 5, 5, 0, 0]


def test_rows_that_are_gone_leave_no_page_behind_in_the_table(base, adapters, capture) -> None:
    # Padding reads the first page of its row: another could be lent to adapters by now.
    harness = EngineHarness(base, adapters, capture=capture)
    graphs = harness.engine.worker.graphs
    assert graphs is not None
    harness.play(cast(harness, [None] * 7, "seven"))
    harness.play(cast(harness, [None] * 2, "two"))
    assert set(graphs._page_table[2:, 0].tolist()) == {graphs._spare_page}


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
    assert failing.calls == (2 if how == "repeats itself" else 1)  # prompts are computed once each
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
@pytest.mark.parametrize("row_tokens", [1, ROW_TOKENS])
@pytest.mark.parametrize("adapted", [False, True])
def test_the_pass_with_the_real_operators_needs_no_value_from_the_device(
    base, adapted: bool, row_tokens: int, monkeypatch: pytest.MonkeyPatch
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
        hidden = graphs._forward(Bucket(6, row_tokens, 1024), adapted)
    assert hidden.shape == (6, config.hidden_size)
    names = [launch.kernel.__name__ for launch in launched]
    layers = config.layers
    expected = {"attention_kernel": 1, "merge_kernel": 1, "append_kv_kernel": 1, "rotary_kernel": 1}
    for name, count in {**expected, "act_and_mul_kernel": 1, "rms_norm_kernel": 4}.items():
        assert names.count(name) == count * layers, name
    for name, count in {"plan_kernel": 4, "shrink_kernel": 4 * layers, "expand_kernel": 4 * layers}.items():
        assert names.count(name) == count * adapted, name
    assert not REFUSED & {call.name for call in recording.calls}


@given(
    most_seqs=st.integers(1, 300),
    most_tokens=st.integers(1, 600),
    counts=st.lists(st.one_of(st.just(1), st.integers(1, 20)), min_size=1, max_size=300),
    context=st.integers(20, 5000),
    most_context=st.sampled_from((40, 256, 1000, 5000)),
)
def test_a_step_without_prompts_has_a_bucket_that_fits_it_and_is_little_larger(
    most_seqs: int, most_tokens: int, counts: list[int], context: int, most_context: int
) -> None:
    most_tokens = max(most_seqs, most_tokens)
    of_layout = Buckets(MemoryLayout(64, 16, most_seqs, most_context, most_tokens))
    counts = counts[:most_seqs]
    tokens, longest = sum(counts), max(counts)
    assume(tokens <= most_tokens)
    context = min(context, most_context)
    bucket = of_layout.of(tokens, longest, context)
    if bucket is None:
        assert longest > ROW_TOKENS or tokens > MOST_TOKENS
        return
    assert bucket in set(of_layout)
    assert tokens <= bucket.tokens <= of_layout.most
    assert longest <= bucket.row_tokens
    assert bucket.tokens < (1.5 if longest == 1 else 2) * tokens
    assert (bucket.row_tokens == 1) == (longest == 1), "decode steps pay for nobody's several tokens"
    assert context <= bucket.max_kv <= most_context
    if bucket.tokens >= FEW_TOKENS:
        assert bucket.max_kv <= max(256, 4 * context) or bucket.max_kv == most_context
    assert of_layout.of(tokens, longest, context) == bucket, "nothing but the sizes decides"


def test_buckets_are_few_and_each_is_some_steps() -> None:
    for most_seqs, most_tokens in ((1, 16), (2, 512), (5, 8), (64, 512), (100, 2048), (256, 4096)):
        all_of_them = list(Buckets(MemoryLayout(64, 16, most_seqs, 1024, most_tokens)))
        assert all_of_them == sorted(set(all_of_them), key=lambda bucket: (bucket.row_tokens, *bucket))
        assert [bucket.tokens for bucket in all_of_them if bucket.row_tokens == 1][-1] == most_seqs
        assert len({(bucket.tokens, bucket.row_tokens) for bucket in all_of_them}) < 26
    of_long_contexts = list(Buckets(MemoryLayout(64, 16, 256, 131072, 4096)))
    assert len(of_long_contexts) < 60
    assert {bucket.max_kv for bucket in of_long_contexts} == {256, 1024, 131072}


@given(counts=st.lists(st.integers(1, ROW_TOKENS), min_size=1, max_size=12), data=st.data())
def test_where_rows_begin_in_a_graph_is_where_they_begin_in_the_step(counts: list[int], data) -> None:
    graphs = object.__new__(DecodeGraphs)
    tokens = sum(counts)
    end = data.draw(st.integers(tokens, 2 * tokens))
    graphs._single_starts = torch.arange(2 * end + 1, dtype=torch.int32)
    graphs._query_start = torch.full((2 * end + 1,), -1, dtype=torch.int32)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    graphs._ends, copies = {}, Copies()
    graphs._fill_query_start(copies, starts, tokens, end)
    copies.launch()
    lengths = graphs._query_start[: end + 1].diff().tolist()
    assert lengths[: len(counts)] == counts
    behind = lengths[len(counts) :]
    assert behind == [1] * (end - tokens) + [0] * (len(behind) - (end - tokens))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_graphs_choose_what_kernels_launched_one_by_one_choose(base, adapters) -> None:
    from personae.engine.worker.capture import CudaCapture

    eager = EngineHarness(base, adapters, device="cuda")
    graphs = EngineHarness(base, adapters, device="cuda", capture=CudaCapture())
    for tag, mix in MIXES.items():
        wanted = tokens(eager.play(cast(eager, mix, tag)))
        assert tokens(graphs.play(cast(graphs, mix, tag))) == wanted
