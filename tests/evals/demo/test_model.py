import json

import pytest
import torch
from personae.evals.demo import data
from personae.evals.demo.measure import ADAPTERS, MODEL, grade, held_out, through_transformers
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def base():
    return through_transformers()


@pytest.mark.parametrize("task", data.TASKS)
def test_the_bundled_model_answers_most_held_out_questions(base, task):
    samples = held_out(task, 8)
    grades = [grade(sample, text)["exact"] for sample, text in zip(samples, base(samples), strict=True)]
    assert sum(grades) >= 5


@pytest.mark.parametrize("name", data.ADAPTER_TASKS)
def test_each_adapter_does_what_the_base_cannot(base, name):
    samples = held_out(name, 8)
    adapted = through_transformers(ADAPTERS / name)(samples)
    without = base(samples)
    right = sum(grade(sample, text)["exact"] for sample, text in zip(samples, adapted, strict=True))
    before = sum(grade(sample, text)["exact"] for sample, text in zip(samples, without, strict=True))
    assert right >= 5
    assert before <= 2


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
