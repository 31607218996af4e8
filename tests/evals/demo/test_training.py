import argparse
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from personae.evals.demo import data
from personae.evals.demo.batches import IGNORE, chunk, collate, encode
from personae.evals.demo.fused import RmsNorm, Rotate
from personae.evals.demo.train import MODEL, Trainer, config, learning_rate
from personae.evals.demo.wiring import wire


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_an_untrained_model_already_copies():
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config())
    words = torch.randint(300, 2000, (2, 48))
    twice = torch.cat((words, words), 1)
    with torch.no_grad():
        plain = (model(twice).logits[:, 48:-1].argmax(-1) == twice[:, 49:]).float().mean()
        wire(model)
        wired = (model(twice).logits[:, 48:-1].argmax(-1) == twice[:, 49:]).float().mean()
    assert plain < 0.05
    assert wired > 0.6


def test_the_norm_written_by_hand_is_torchs():
    x, weight = torch.randn(3, 5, 16, requires_grad=True), torch.rand(16, requires_grad=True)
    upstream = torch.randn(3, 5, 16)
    results = []
    for norm in (
        lambda: RmsNorm.apply(x, weight, 1e-6),
        lambda: torch.nn.functional.rms_norm(x, (16,), weight, 1e-6),
    ):
        y = norm()
        results.append((y, *torch.autograd.grad((y * upstream).sum(), (x, weight))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_rotation_written_by_hand_has_the_right_gradient():
    angle = torch.rand(4, 8, dtype=torch.float64).repeat(1, 2)
    x = torch.randn(2, 4, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: Rotate.apply(x, angle.cos(), angle.sin()), (x,))


def test_targets_are_the_completion_and_nothing_else(tokenizer):
    sample = next(data.samples(data.TASKS["tool"], "train", "t"))
    row = encode(tokenizer, sample)
    batch = collate([row])
    said = batch.targets[batch.targets != IGNORE].tolist()
    assert tokenizer.decode(said, skip_special_tokens=False) == sample.completion
    assert batch.tokens[0, : len(row.ids)].tolist() == row.ids


def test_lists_of_required_properties_can_be_taught_too(tokenizer):
    sample = next(data.samples(data.TASKS["extract"], "train", "t"))
    row = encode(tokenizer, sample, lists=True)
    said = tokenizer.decode([row.ids[index] for index in row.taught], skip_special_tokens=False)
    assert said.endswith(sample.completion)
    assert said.removesuffix(sample.completion).strip('}]" ').split('", "') == sample.schema["required"]


def test_batches_keep_within_budget_and_context(tokenizer):
    for batch in chunk(data.mixture("t", 0.5), tokenizer, Random(0), 4, 1024):
        assert batch.tokens.numel() <= 1024
        assert int(batch.positions.max()) < 2048
        assert bool((batch.positions.diff() >= 1).all())


def test_the_learning_rate_rises_stays_and_falls():
    rates = [learning_rate(step, 1000) for step in range(1000)]
    assert rates[0] < rates[49] == rates[500] == 1.0
    assert rates[999] < 0.02


def test_training_that_stops_and_goes_on_ends_where_it_would_have(tmp_path: Path):
    def trained(folder: Path, *stops: int) -> torch.Tensor:
        folder.mkdir()
        for stop in stops:
            options = argparse.Namespace(
                seed=1,
                threads=1,
                device="cpu",
                runs=folder,
                workers=1,
                steps=1000,
                tokens=256,
                measure=1000,
                warm=False,
            )
            trainer = Trainer(options, 0)
            list(trainer.train_until(stop))
            trainer.save()
        return trainer.model.model.embed_tokens.weight.detach()

    torch.testing.assert_close(trained(tmp_path / "a", 1, 3), trained(tmp_path / "b", 3))
