import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from personae.evals.demo import data
from personae.evals.demo.grading import grade, held_out
from personae.evals.demo.measure import ADAPTERS, MODEL, through_transformers


@pytest.fixture(scope="module")
def base():
    return through_transformers()


def right(generate, task: str, count: int) -> float:
    samples = held_out(task, count)
    return sum(grade(sample, text)["exact"] for sample, text in zip(samples, generate(samples), strict=True))


@pytest.mark.parametrize("task", ["result", "chat"])
def test_the_bundled_model_answers_most_held_out_questions(base, task):
    assert right(base, task, 10) >= 5


def test_an_adapter_does_what_the_base_cannot(base):
    assert right(base, "triage", 10) == 0
    assert right(through_transformers(ADAPTERS / "triage"), "triage", 10) >= 8


def test_decoding_in_a_batch_is_decoding_alone(base):
    samples = held_out("chat", 3) + held_out("tool", 2)
    assert base(samples) == [base([sample])[0] for sample in samples]


def test_weights_are_small_and_in_bf16():
    assert (MODEL / "model.safetensors").stat().st_size < 25 * 2**20
    assert sum(path.stat().st_size for path in ADAPTERS.glob("*/*.safetensors")) < 6 * 2**20
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings >= 2048
    assert sum(parameter.numel() for parameter in model.parameters()) <= 12_000_000


def test_adapters_differ_in_rank_and_targets():
    configs = [
        json.loads((ADAPTERS / name / "adapter_config.json").read_text()) for name in data.ADAPTER_TASKS
    ]
    assert len({config["r"] for config in configs}) >= 3
    assert len({tuple(sorted(config["target_modules"])) for config in configs}) >= 3
