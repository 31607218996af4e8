"""The training of a head: what it learns, what it keeps, and that the server computes what training did."""

import json
import random
from pathlib import Path

import pytest
import torch
from engine_harness import EngineHarness
from tiny_models import model_folder
from transformers import LlamaForCausalLM

from personae.api.bundled import smollm2
from personae.engine.speculation.policy import Always
from personae.engine.speculation.speculator import expected_text
from personae.engine.tokens import Tokenizer
from personae.evals.demo.eagle3.answers import bodies
from personae.evals.demo.eagle3.features import INDEX, STATES, Text, layers_read, states, states_of, texts
from personae.evals.demo.eagle3.head import Head
from personae.evals.demo.eagle3.prompts import prompts
from personae.evals.demo.eagle3.train import Trainer, batch_of, begin, frequent, resumed, save, shape_of
from personae.evals.speculation import LOADS

SHIPPED = Path(__file__).parents[3] / "evals" / "demo" / "eagle3" / "head"


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="module")
def run(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the states of a few texts of few tokens."""
    out, rng, at = tmp_path_factory.mktemp("run"), random.Random(1), 0
    with (out / STATES).open("wb") as kept, (out / INDEX).open("w") as index:
        for _ in range(24):
            ids = rng.choices(range(4, 40), k=rng.randint(20, 30))
            kept.write(states_of(model, ids).contiguous().view(torch.int16).numpy().tobytes())
            index.write(json.dumps({"ids": ids, "prompt": 6, "at": at}) + "\n")
            at += len(ids)
    return out


def trainer(model: LlamaForCausalLM, run: Path) -> Trainer:
    torch.manual_seed(0)
    head = Head(shape_of(model, 48, 256))
    tokens = frequent(texts(run), 256)
    begin(head, model, tokens)
    return Trainer(model, head, tokens, states(run, 64))


def test_a_head_learns_the_models_distribution(model: LlamaForCausalLM, run: Path) -> None:
    made, found = trainer(model, run), texts(run)
    before = made.right(found[:12], 3)
    first = sum(made.step(batch_of(found, 1, step, 200), 2e-3, 3) for step in range(4))
    for step in range(4, 40):
        made.step(batch_of(found, 1, step, 200), 2e-3, 3)
    assert sum(made.step(batch_of(found, 1, step, 200), 2e-3, 3) for step in range(4)) < first - 0.1
    right = made.right(found[:12], 3)
    assert len(right) == len(before) == 3
    assert right[0] > before[0]


def test_training_that_is_taken_up_again_goes_on_as_if_it_was_not_interrupted(
    model: LlamaForCausalLM, run: Path, tmp_path: Path
) -> None:
    found, ends = texts(run), []
    for stops in (False, True):
        made = trainer(model, run)
        for step in range(6):
            if stops and step == 3:
                save(tmp_path, made, 3, (2, 4, 5))
                made = trainer(model, run)
                assert resumed(tmp_path, made) == 3
            made.step(batch_of(found, 1, step, 200), 1e-3, 2)
        ends.append(made.head.state_dict())
    assert all(ends[0][name].equal(ends[1][name]) for name in ends[0])


def test_the_server_computes_the_logits_that_training_computed(
    model: LlamaForCausalLM, folder: Path, run: Path, tmp_path: Path
) -> None:
    made = trainer(model, run)
    made.head.to(torch.bfloat16).float()  # as it is kept
    save(tmp_path, made, 0, layers_read(model.config.num_hidden_layers))
    harness = EngineHarness(folder, policy=Always(), draft=tmp_path, propose=expected_text)
    speculator = harness.engine._speculator
    assert speculator is not None
    proposer = speculator._model
    logits: list[torch.Tensor] = []
    compute = proposer._head.logits  # type: ignore[union-attr]  # a HeadProposer

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        logits.append(compute(hidden))
        return logits[-1]

    proposer._head.logits = noted  # type: ignore[union-attr]
    prompt = random.Random(2).choices(range(4, 40), k=20)
    played = harness.play([harness.log("a", prompt, max_tokens=3, ignore_eos=True)])["a"]
    ids = [*prompt, played.tokens[0]]
    with torch.inference_mode():
        exact = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        there = states_of(exact, ids[:-1])[None, :, : 3 * 64]
        embedded = exact.model.embed_tokens(torch.tensor([ids[1:]]))
        expected = made.head(embedded, there, 1)[0][0, -1]
    torch.testing.assert_close(logits[0][0], expected, atol=2e-3, rtol=2e-3)


def test_states_are_read_as_they_were_written(model: LlamaForCausalLM, run: Path) -> None:
    found = texts(run)
    assert [type(text) for text in found] == [Text] * 24
    kept = states(run, 64)
    assert len(kept) == sum(len(text.ids) for text in found)
    last = found[-1]
    assert kept[last.at :].equal(states_of(model, last.ids))


def test_no_question_of_the_training_is_one_that_is_measured() -> None:
    measured = {
        str(body(index)["messages"][-1]["content"]) for body in LOADS.values() for index in range(400)
    }
    asked = list(prompts(0))
    assert len(asked) > 1000
    assert not measured.intersection(asked)
    assert len({str(body) for body in bodies(2)}) > len(asked)


def test_the_head_that_comes_with_the_demo_guesses_what_the_default_model_writes() -> None:
    file = smollm2()
    if file is None:
        pytest.skip("the default model's package is not installed")
    weights = SHIPPED / "model.safetensors"
    assert weights.stat().st_size < 15_000_000
    tokenizer = Tokenizer.load(file)
    said = "<|im_start|>user\nWhat should I know about lighthouses?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(said, add_special_tokens=False)
    harness = EngineHarness(file, dtype="bfloat16", policy=Always(), draft=SHIPPED, propose=expected_text)
    plain = EngineHarness(file, dtype="bfloat16")
    guessed, alone = (
        each.play([each.log("a", prompt, max_tokens=48, ignore_eos=True)])["a"].tokens
        for each in (harness, plain)
    )
    assert guessed == alone
    counters = harness.scheduler.counters
    assert counters.accepted_by["head"] >= 8
