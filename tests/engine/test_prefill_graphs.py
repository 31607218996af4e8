"""Steps with prompts as graphs that are cut at attention."""

from pathlib import Path

import pytest
import torch
from engine_harness import EngineHarness, Played
from recorded_graphs import RecordedGraphs, storage
from tiny_adapters import make_zoo
from tiny_models import model_folder

from personae.engine.worker import prefill_graphs
from personae.engine.worker.prefill_graphs import PrefillGraphs, sizes
from personae.kernels import registry

NAMES = ("rank-8-attention", "rslora", "rank-1")
LAYERS = 2


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_zoo(tmp_path_factory.mktemp("adapters"), base, NAMES)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    graphs = RecordedGraphs()
    monkeypatch.setattr(registry, "operators", graphs.operators)
    return graphs


def graphs_of(harness: EngineHarness) -> PrefillGraphs:
    found = harness.engine.worker.prefill_graphs
    assert found is not None
    return found


def prompts(harness: EngineHarness, lengths: list[int], names: list[str | None], tag: str) -> list:
    return [
        harness.log(f"{tag}-{i}", [*range(4 + i, 4 + i + length)], name, max_tokens=4, salt=tag.encode())
        for i, (length, name) in enumerate(zip(lengths, names, strict=True))
    ]


def tokens(played: dict[str, Played]) -> dict[str, list[int]]:
    return {id: one.tokens for id, one in played.items()}


MIXES: dict[str, tuple[list[int], list[str | None]]] = {
    "one prompt": ([70], ["rslora"]),
    "two, of other lengths and adapters": ([41, 50], ["rank-1", "rank-8-attention"]),
    "one with base rows": ([40, 3, 60], [None, "rank-1", None]),
    "base rows alone": ([33, 90], [None, None]),
    "as at first": ([70], ["rslora"]),
}


def test_prompts_of_any_lengths_and_adapters_are_computed_by_the_same_graphs(base, adapters, capture) -> None:
    eager, graphs = (
        EngineHarness(base, adapters, max_batch_tokens=128, page_size=4),
        EngineHarness(base, adapters, max_batch_tokens=128, page_size=4, capture=capture, prefill=True),
    )
    for tag, (lengths, names) in MIXES.items():
        wanted = tokens(eager.play(prompts(eager, lengths, names, tag)))
        assert tokens(graphs.play(prompts(graphs, lengths, names, tag))) == wanted
    own = graphs_of(graphs)
    assert len(capture.recordings) == len(own._graphs) == 4  # of 64 and 128 tokens, with adapters and without
    assert capture.cuts == 4 * LAYERS
    assert capture.replays == graphs.steps - len(MIXES), "all but the last of each mix, which has no rows"
    assert own._graphs[64, True].trials == 0
    kept, made = (harness.engine.worker.kv for harness in (eager, graphs))
    pages = made.data[:, :, : made.num_pages]
    torch.testing.assert_close(pages, kept.data, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_a_graph_reads_nothing_that_does_not_stay_where_it_is(base, adapters, capture) -> None:
    harness = EngineHarness(base, adapters, capture=capture, prefill=True)
    harness.play(prompts(harness, [70, 40], ["rslora", None], "x"))
    runner = harness.engine.worker
    model, pool = runner.model, runner.adapters
    weights = [(stack.a, stack.b, stack.table.rank, stack.table.pages) for stack in pool.stacks.values()]
    standing = {
        storage(tensor)
        for tensor in (
            *(tensor for _, tensor in model.tensors()),
            *(table for layer in model.layers for table in layer.attention.rope or ()),
            runner.kv.data,
            *(tensor for each in weights for tensor in each),
            *graphs_of(harness).buffers,
        )
    }
    assert capture.recordings
    for recording in capture.recordings:
        assert recording.outside() <= standing


def test_a_prompt_beyond_the_largest_graph_is_launched_kernel_by_kernel(base, capture, monkeypatch) -> None:
    monkeypatch.setattr(prefill_graphs, "SIZES", (16, 32))
    harness = EngineHarness(base, capture=capture, prefill=True)
    wanted = EngineHarness(base)
    logs = prompts(harness, [33], [None], "x")
    assert tokens(harness.play(logs)) == tokens(wanted.play(prompts(wanted, [33], [None], "x")))
    assert {size for size, _ in graphs_of(harness)._graphs} == {16}, "only of its decode steps"


def test_a_graph_that_computes_something_else_turns_them_off_and_its_step_runs_without(
    base, capture, monkeypatch, caplog
) -> None:
    attention = PrefillGraphs._attention

    def stale(self, layer, cut):
        return attention(self, layer, cut if layer else lambda _run: None)

    monkeypatch.setattr(PrefillGraphs, "_attention", stale)
    harness, wanted = EngineHarness(base, capture=capture, prefill=True), EngineHarness(base)
    found = tokens(harness.play(prompts(harness, [50], [None], "x")))
    assert found == tokens(wanted.play(prompts(wanted, [50], [None], "x")))
    assert "CUDA graphs for prompts are off" in caplog.text
    assert capture.replays == 1


def test_graphs_are_for_few_numbers_of_tokens_that_a_layout_may_have() -> None:
    assert sizes(4096) == (64, 128, 192, 256, 384, 512)
    assert sizes(200) == (64, 128, 192, 200)
    assert sizes(40) == (40,)
