"""Embeddings come out of steps as the hidden states of transformers and PEFT, in any company."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import EngineHarness
from hf import hf_model
from peft import PeftModel
from tiny_adapters import make_zoo
from tiny_models import VOCAB, model_folder

from personae.engine.observer import PromptObserver
from personae.engine.plan import StepPlan
from personae.engine.worker.worker import Forward

LENGTHS = [1, 2, 16, 17, 150]
ADAPTERS = ["rank-8-attention", "rank-16-mlp", None]


def prompt(length: int) -> list[int]:
    return random.Random(f"embedded/{length}").choices(range(4, VOCAB), k=length)


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_zoo(tmp_path_factory.mktemp("adapters"), base, ADAPTERS)


@pytest.fixture(scope="module")
def truth(base: Path, adapters: dict[str, Path]) -> dict[str | None, Any]:
    models: dict[str | None, Any] = {None: hf_model(base)}
    for name, path in adapters.items():
        models[name] = PeftModel.from_pretrained(hf_model(base), path).eval()
    return models


@torch.no_grad()
def hidden_states(model: Any, tokens: list[int]) -> np.ndarray:
    """Behind the last norm, [tokens, H]."""
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0].float().numpy()
    assert states.shape[0] == len(tokens)
    return states


@pytest.mark.parametrize("chunk", [512, 40])
def test_means_and_last_tokens_are_those_of_peft_beside_answers(
    base: Path, adapters: dict[str, Path], truth: dict[str | None, Any], chunk: int
) -> None:
    harness = EngineHarness(base, adapters, max_batch_tokens=chunk)
    logs = [
        harness.log(f"{pooling}-{name}-{length}", prompt(length), name, max_tokens=1, pooling=pooling)
        for pooling in ("mean", "last")
        for name in ADAPTERS
        for length in LENGTHS
    ]
    answers = [harness.log(f"answer-{name}", prompt(33), name, max_tokens=40) for name in ADAPTERS]
    alone = EngineHarness(base, adapters).play(answers)
    together = [*answers, *logs]
    random.Random(2).shuffle(together)
    played = harness.play(together)
    for log in answers:
        assert played[log.id].tokens == alone[log.id].tokens
        assert played[log.id].embedding is None
    for name in ADAPTERS:
        for length in LENGTHS:
            states = hidden_states(truth[name], prompt(length))
            for pooling, wanted in (("mean", states.mean(0)), ("last", states[-1])):
                found = played[f"{pooling}-{name}-{length}"].embedding
                assert found is not None
                np.testing.assert_allclose(
                    np.frombuffer(found, np.float32), wanted, rtol=1e-4, atol=1e-5, err_msg=f"{name} {length}"
                )


def test_steps_without_such_a_prompt_are_not_observed(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    observed: list[int] = []
    observe = PromptObserver.observe

    def noted(self: PromptObserver[Any], plan: StepPlan, forward: Forward) -> Any:
        observed.append(plan.step)
        return observe(self, plan, forward)

    monkeypatch.setattr(PromptObserver, "observe", noted)
    harness = EngineHarness(base, max_batch_tokens=40)
    logs = [
        harness.log("answer", prompt(20), max_tokens=40),
        harness.log("embedded", prompt(150), max_tokens=1, pooling="mean"),
        harness.log("echoed", prompt(60), max_tokens=20, prompt_logprobs=1),
    ]
    played = harness.play(logs)
    assert played["embedded"].embedding is not None
    assert len(played["echoed"].prompt_logprobs) == 60
    assert 0 < len(set(observed)) <= max(observed) + 1 < harness.steps / 2
    assert not harness.engine._observers


def test_a_cached_prefix_saves_work_for_the_last_token_and_is_not_used_for_a_mean(base: Path) -> None:
    harness = EngineHarness(base)
    for pooling, cached in (("last", 0), ("last", 144), ("mean", 0)):
        log = harness.log(f"{pooling}-{cached}", prompt(150), max_tokens=1, pooling=pooling, speculate=False)
        played = harness.play([log])[log.id]
        assert played.cached == cached
        assert played.embedding is not None


def test_a_preempted_prompt_gives_the_same_vector(base: Path) -> None:
    logs = [("mean", 150), ("last", 150), ("mean", 130)]
    roomy, tight = EngineHarness(base), EngineHarness(base, num_pages=14, max_batch_tokens=48)
    vectors = []
    for harness in (roomy, tight):
        embedded = [
            harness.log(f"{i}", prompt(length), max_tokens=1, pooling=pooling)
            for i, (pooling, length) in enumerate(logs)
        ]
        others = [
            harness.log(f"answer-{i}", prompt(20 + i), max_tokens=60, ignore_eos=True) for i in range(3)
        ]
        played = harness.play([*others, *embedded])
        vectors.append([np.frombuffer(played[log.id].embedding or b"", np.float32) for log in embedded])
    for one, other in zip(*vectors, strict=True):
        assert len(one) == len(other) > 0
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    assert tight.scheduler.counters.preemptions > 0
