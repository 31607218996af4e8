"""Stages that have different layers answer as one process does, alone and with ranks that share a stage."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness, comms_of
from family_models import make_family_folder
from shared_model import EVERY_KIND, adapters_of, same_answers
from tiny_models import model_folder

from personae.engine.loader import load_model
from personae.engine.parallel.pipeline import Pipeline
from personae.engine.scheduling import scheduler
from personae.errors import LoadError

CPU = torch.device("cpu")
TOKENS = 64
FOUR: dict[str, dict[str, Any]] = {
    "queries": {"rank": 8, "targets": ("q_proj", "v_proj"), "seed": 31, "scale": 0.5},
    "output": {"rank": 16, "targets": ("o_proj",), "seed": 32, "scale": 0.5},
    "one-layer": {"rank": 4, "targets": ("q_proj", "o_proj"), "layers": [1], "seed": 33, "scale": 0.5},
    "last-layer": {"rank": 3, "targets": ("q_proj",), "layers": [2], "seed": 34, "scale": 0.5},
}


@pytest.fixture(autouse=True)
def _several_steps_in_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MICRO_BATCH", 2)


@pytest.mark.parametrize(
    ("family", "stages", "changes"),
    [
        ("llama", 2, {}),
        ("gemma3", 3, {}),  # a tied output matrix, norms after halves, an embedding that is scaled
        ("qwen3_moe", 2, {}),
    ],
)
def test_base_and_four_adapters_answer_as_in_one_process(
    family: str, stages: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    base = model_folder(family, **changes)
    same_answers(base, 1, adapters_of(base, tmp_path, FOUR), stages=stages, tokens=TOKENS)


@pytest.mark.parametrize("case", ["qwen3_next", "lfm2"])  # states; convolutions, whose layers keep less
def test_layers_that_keep_states_answer_as_in_one_process(case: str, tmp_path: Path) -> None:
    base = make_family_folder(tmp_path / "model", case)
    attends = {"qwen3_next": 1, "lfm2": None}[case]
    made = {
        name: options | ({} if attends is None or "layers" not in options else {"layers": [attends]})
        for name, options in FOUR.items()
    }
    if case == "lfm2":
        made = {name: {**options, "targets": ("in_proj", "out_proj")} for name, options in made.items()}
    same_answers(base, 1, adapters_of(base, tmp_path, made), stages=2, tokens=TOKENS)


def test_stages_give_each_other_all_residual_streams_of_a_model_that_has_several(tmp_path: Path) -> None:
    base = make_family_folder(tmp_path / "model", "gemma3n")
    made = {"attention": {"rank": 4, "seed": 3, "targets": ["q_proj", "o_proj"]}}
    same_answers(base, 1, adapters_of(base, tmp_path, made), stages=2, tokens=TOKENS)


@pytest.mark.parametrize("size", [1, 2])
def test_layers_with_embeddings_of_their_own_that_share_keys_answer_as_in_one_process(
    size: int, tmp_path: Path
) -> None:
    base = make_family_folder(tmp_path / "model", "gemma4")
    made = {
        "attention": {"rank": 4, "seed": 3, "targets": ["q_proj", "o_proj"]},
        "mlp": {"rank": 4, "seed": 4, "targets": ["down_proj", "up_proj"]},
    }
    same_answers(base, size, adapters_of(base, tmp_path, made), stages=2, tokens=TOKENS)
    said = (
        "--pipeline-parallel-size 3: this model has 6 layers, 5 of which belong to the last stage, and each"
    )
    with pytest.raises(LoadError, match=said):
        load_model(base, device=CPU, comm=comms_of(1, 3)[0])


def test_ranks_share_each_stage_with_adapters_of_every_kind(tmp_path: Path) -> None:
    base = model_folder("qwen2")
    same_answers(base, 2, adapters_of(base, tmp_path, EVERY_KIND), stages=2, tokens=TOKENS)


def test_quantized_weights_answer_as_in_one_process() -> None:
    same_answers(model_folder("llama", intermediate_size=128), 1, stages=3, quantize="int4")


def test_a_prompts_log_probabilities_and_vectors_are_as_in_one_process() -> None:
    def load(made: EngineHarness) -> Any:
        prompt = range(20, 90)
        return made.play(
            [
                made.log("scored", prompt, prompt_logprobs=2, logprobs=2, max_tokens=8),
                made.log("vector", prompt, pooling="mean", max_tokens=1),
            ]
        )

    base = model_folder("llama")
    assert load(EngineHarness(base, stages=3, shared=True)) == load(EngineHarness(base))


def test_a_step_sends_the_hidden_states_of_its_tokens_once_for_each_stage() -> None:
    made = EngineHarness(model_folder("llama"), ranks=2, stages=2, shared=True)
    comms = [rank.model.comm for rank in made.ranks]
    made.play([made.log("warm", range(5, 9), max_tokens=1)])
    before = [comm.sent for comm in comms if isinstance(comm, Pipeline)]
    made.play([made.log("one", range(20, 29), max_tokens=1)])
    after = [comm.sent for comm in comms if isinstance(comm, Pipeline)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [9 * 64 * 4] * 4


@pytest.mark.parametrize("case", ["llama", "qwen3_next"])
def test_long_prompts_go_through_the_stages_in_parts(case: str, tmp_path: Path) -> None:
    base = model_folder(case) if case == "llama" else make_family_folder(tmp_path / "model", case)
    made = {"a": FOUR["queries"], "b": FOUR["output"]}
    adapters = adapters_of(base, tmp_path, made)
    alone = EngineHarness(base, adapters, num_pages=64)
    together = EngineHarness(base, adapters, num_pages=64, shared=True, stages=2)
    sent: list[list[int]] = []
    for rank in together.ranks:
        own = rank.pack

        def pack(*asked: Any, own: Any = own) -> Any:
            packed = own(*asked)
            sent.append([part.tokens.stop - part.tokens.start for part in packed.parts])
            return packed

        rank.pack = pack  # type: ignore[method-assign]  # to see the parts

    def load(engine: EngineHarness) -> Any:
        lengths = {"long": 150, "short": 7, "other": 90}
        return engine.play(
            [
                engine.log(f"{name} {adapter}", [(7 * i + length) % 500 + 5 for i in range(length)], adapter)
                for name, length in lengths.items()
                for adapter in (None, "a", "b")
            ]
        )

    assert load(together) == load(alone)
    assert max(map(len, sent)) == 4
    assert [] in sent  # steps with few tokens are whole


def test_a_slot_that_changes_hands_while_its_row_is_in_the_stages_gives_nobody_other_tokens() -> None:
    base = model_folder("llama")
    made = EngineHarness(base, stages=2, shared=True, max_seqs=4)

    def logs(names: str) -> list[Any]:
        return [made.log(name, [20 + 3 * ord(name) % 400, 7, 9], max_tokens=24) for name in names]

    alone = EngineHarness(base).play(logs("bcdef"))
    engine, plans = made.engine, made.scheduler
    for log in logs("abcdef"):
        plans.add(log)
    found: dict[str, list[int]] = {name: [] for name in "abcdef"}
    in_stages: deque[Any] = deque()
    cancelled = False

    def read() -> None:
        for delta in plans.commit(engine.finish(in_stages.popleft())):
            found[delta.id] += delta.tokens

    while True:
        if not cancelled and len(in_stages) == 1 and len(found["a"]) == 6:
            cancelled = plans.cancel("a")  # its next token is in the stages
        if (plan := plans.plan()) is not None:
            hidden = engine.forward(engine.prepare(plan, {}), lambda: None)
            in_stages.append(engine.sample(plan, hidden))
        elif not in_stages:
            break
        while len(in_stages) > (plan is not None):
            read()
    assert cancelled
    assert {name: tokens for name, tokens in found.items() if name != "a"} == {
        name: one.tokens for name, one in alone.items()
    }


def test_parts_that_are_larger_than_the_connections_buffers_pass_both_ways_at_once() -> None:
    first, second = comms_of(1, 2)
    parts = [torch.full((2**20,), float(number)) for number in range(4)]
    found = torch.empty(4, 2**20)

    def pass_on() -> None:
        for _ in parts:
            x = torch.empty(2**20)
            second.receive(x)
            second.send(x + 1)

    assert isinstance(first, Pipeline)
    assert isinstance(second, Pipeline)
    with ThreadPoolExecutor(1) as threads:
        passing = threads.submit(pass_on)
        arrival = first.begin_receive(found)
        for part in parts:
            first.send(part)
        arrival.result()
        passing.result()
    assert torch.equal(found, torch.stack(parts) + 1)


def test_each_stage_has_its_layers_and_only_the_first_has_the_vocabulary() -> None:
    models = [load_model(model_folder("llama"), device=CPU, comm=comm) for comm in comms_of(1, 2)]
    names = [[name for name, _ in model.tensors()] for model in models]
    whole = [name for name, _ in load_model(model_folder("llama"), device=CPU).tensors()]
    assert sorted(names[0] + names[1]) == sorted(whole)
    assert {name.split(".")[2] for name in names[0] if ".layers." in name} == {"0"}
    assert {name.split(".")[2] for name in names[1]} == {"1", "2"}


def test_more_stages_than_layers_are_refused_with_their_number() -> None:
    with pytest.raises(LoadError, match="--pipeline-parallel-size 4: this model has 3 layers"):
        load_model(model_folder("llama"), device=CPU, comm=comms_of(1, 4)[0])


def test_a_stage_whose_neighbour_has_gone_says_so() -> None:
    first, second = comms_of(1, 2)
    assert isinstance(first, Pipeline)
    assert isinstance(second, Pipeline)
    second.close()
    with pytest.raises(RuntimeError, match="has closed its connection"):
        first.begin_receive(torch.empty(3)).result()
    with pytest.raises(RuntimeError, match="has closed its connection"):
        first.send(torch.ones(3))
