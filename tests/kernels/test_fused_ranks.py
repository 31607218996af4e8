"""The fused decoder on ranks, which add up in it what each has computed. The ranks are threads here."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness, comms_of
from hf import hf_logits, hf_model, relative_error
from paged import PagedSequences
from shared_model import EVERY_KIND, adapters_of
from tiny_models import model_folder

from personae.engine.loader import load_model
from personae.engine.parallel import shared_file
from personae.engine.parallel.comm import SharedMemory
from personae.engine.parallel.shared_file import new_shared_file
from personae.kernels.cpu import operators

pytestmark = pytest.mark.skipif("fuse" not in operators(), reason="no compiler, or no AVX2 on this machine")
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"torch_dtype": "bfloat16", "head_dim": 32, "intermediate_size": 256}
VARIANTS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("llama", {}, 2),
    "llama tied, with biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        4,
    ),
    "qwen3, an uneven vocabulary": ("qwen3", {"vocab_size": 511}, 2),
}


def folder_of(variant: str) -> tuple[Path, int]:
    """The model, and how many ranks share it."""
    family, overrides, size = VARIANTS[variant]
    return model_folder(family, **SIZES, **overrides), size


def tokens_of(seed: int, count: int) -> list[int]:
    return torch.randint(5, 500, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Ranks:
    """The decoders of all ranks, and what they keep of sequences."""

    def __init__(self, folder: Path, size: int, quantize: str | None = None) -> None:
        self.decoders = [
            load_model(folder, device=CPU, quantize=quantize, comm=comm) for comm in comms_of(size)
        ]
        assert all(decoder._fused is not None for decoder in self.decoders)
        self._kept = [PagedSequences(decoder, page_size=8, seed=1) for decoder in self.decoders]
        self._threads = ThreadPoolExecutor(size)

    def step(self, tokens: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """The logits of each sequence's last token, which all ranks have."""
        first, *others = self._threads.map(lambda kept: kept.step(tokens), self._kept)
        assert all(torch.equal(other[name], first[name]) for other in others for name in first)
        return first


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_as_near_to_transformers_as_those_of_one_process(variant: str) -> None:
    folder, size = folder_of(variant)
    prompt = tokens_of(1, 100)
    truth = hf_logits(hf_model(folder), prompt)[-1]
    alone = PagedSequences(load_model(folder, device=CPU), page_size=8, seed=1).step({"a": prompt})["a"]
    found = Ranks(folder, size).step({"a": prompt})["a"]
    assert relative_error(found, truth) < 1.2 * relative_error(alone, truth) + 1e-3


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantized_weights_have_the_logits_of_one_process(quantize: str) -> None:
    folder, size = folder_of("llama")
    prompt = tokens_of(1, 100)
    whole = load_model(folder, device=CPU, quantize=quantize)
    alone = PagedSequences(whole, page_size=8, seed=1).step({"a": prompt})["a"]
    assert relative_error(Ranks(folder, size, quantize).step({"a": prompt})["a"], alone) < 0.02


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_has_the_same_bits_whatever_is_beside_it(variant: str) -> None:
    folder, size = folder_of(variant)
    prompt = tokens_of(2, 60)
    whole = Ranks(folder, size).step({"a": prompt})["a"]
    ranks = Ranks(folder, size)
    for number, (first, stop) in enumerate([(0, 1), (1, 34), (34, 59), (59, 60)]):
        found = ranks.step({"b": tokens_of(number, 5), "a": prompt[first:stop]})
    assert torch.equal(found["a"], whole)


def test_a_step_that_the_shared_memory_has_no_room_for_runs_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_file, "SUMS_BYTES", 32 * 64 * 4)
    folder, size = folder_of("llama")
    ranks = Ranks(folder, size)
    calls: list[int] = []
    fused = ranks.decoders[0]._fused
    assert fused is not None
    own = fused.forward
    fused.forward = lambda tokens, *rest, **more: calls.append(len(tokens)) or own(tokens, *rest, **more)  # type: ignore[method-assign]  # to see what it gets
    long, short = ranks.step({"a": tokens_of(1, 33)}), ranks.step({"b": tokens_of(1, 32)})
    assert calls == [32]
    assert torch.isfinite(long["a"]).all()
    assert torch.isfinite(short["b"]).all()


def test_a_rank_that_waits_within_the_call_for_one_that_has_ended_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check() -> None:
        raise RuntimeError("rank 1 ended")

    folder, size = folder_of("llama")
    file = new_shared_file(size)
    decoder = load_model(folder, device=CPU, comm=SharedMemory(file, 0, size, check))
    os.close(file)
    monkeypatch.setattr(decoder, "_embed", lambda tokens: torch.ones(len(tokens), 64, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="rank 1 ended"):
        PagedSequences(decoder).forward({"a": [5, 6, 7]})


def difference(one: list[float], other: list[float]) -> float:
    """In the mean."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def test_adapters_of_every_kind_change_the_answers_as_in_one_process(tmp_path: Path) -> None:
    base = model_folder("llama", **SIZES)
    adapters = adapters_of(base, tmp_path, EVERY_KIND)

    def play(made: EngineHarness, *names: str | None) -> dict[str, list[float]]:
        found = made.play(
            [made.log(name or "base", range(5, 60), name, prompt_logprobs=1, max_tokens=4) for name in names]
        )
        return {
            name: [entry.logprob for entry in one.prompt_logprobs if entry is not None]
            for name, one in found.items()
        }

    names = (None, *adapters)
    alone = play(EngineHarness(base, adapters, dtype="bfloat16"), *names)
    together = EngineHarness(base, adapters, dtype="bfloat16", ranks=2, shared=True)
    found = play(together, *names)
    for name, logprobs in alone.items():
        assert difference(found[name], logprobs) < 0.05  # of rounding
        assert name == "base" or difference(found[name], found["base"]) > 0.2
    # The bits of adapters that are ranks alone do not depend on the rows beside them.
    plain = (None, "attention", "all")
    in_company = play(together, *plain)
    for name in plain:
        assert play(together, name)[name or "base"] == in_company[name or "base"]
    assert all(rank.model._fused is not None for rank in together.ranks)
