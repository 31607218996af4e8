"""Sampling with FlashInfer's filters, with a stand-in for FlashInfer."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from personae.errors import KernelError
from personae.kernels import flashinfer, operators, reference, registry
from personae.kernels.counter_rng import stream
from personae.kernels.flashinfer.sampling import choose
from personae.kernels.masks import Scratch
from personae.kernels.registry import Implementation, override
from personae.kernels.sampling import SamplingRows

WIDTH, SCRATCH = 1003, Scratch(torch.device("cpu"))
calls: list[str] = []


def _renormalized(probabilities: Tensor, kept: Tensor) -> Tensor:
    chosen = probabilities * kept
    return chosen / chosen.sum(1, keepdim=True)


def _check(probabilities: Tensor, threshold: Tensor, dtype: torch.dtype) -> None:
    assert (probabilities.dtype, threshold.dtype) == (torch.float32, dtype)
    assert probabilities.is_contiguous()
    assert threshold.shape == probabilities.shape[:1]
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(probabilities)))


def top_k_renorm_probs(probs: Tensor, top_k: Tensor) -> Tensor:
    """What FlashInfer documents: 0 < top_k, as many as there are keep all."""
    _check(probs, top_k, torch.int32)
    assert ((top_k > 0) & (top_k <= probs.shape[1])).all()
    calls.append("top_k")
    least = probs.sort(1, descending=True).values.gather(1, top_k.long()[:, None] - 1)
    return _renormalized(probs, probs >= least)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor) -> Tensor:
    """What FlashInfer documents: 0 < top_p, 1 keeps all."""
    _check(probs, top_p, torch.float32)
    assert ((top_p > 0) & (top_p <= 1)).all()
    calls.append("top_p")
    order = probs.sort(1, descending=True)
    before = order.values.cumsum(1, dtype=torch.float64) - order.values
    kept = torch.zeros_like(probs).scatter(1, order.indices, (before < top_p[:, None]).float())
    return _renormalized(probs, kept)


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, part = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")
    whole.__spec__ = ModuleSpec("flashinfer", None)
    vars(part).update(top_k_renorm_probs=top_k_renorm_probs, top_p_renorm_probs=top_p_renorm_probs)
    monkeypatch.setitem(sys.modules, "flashinfer", whole)
    monkeypatch.setitem(sys.modules, "flashinfer.sampling", part)
    calls.clear()


def rows(asked: list[tuple[float, int, float, float]], seed: int = 0) -> SamplingRows:
    temperature, top_k, top_p, min_p = zip(*asked, strict=True)
    return SamplingRows(
        np.array(temperature, np.float32),
        np.array(top_k, np.int64),
        np.array(top_p, np.float64),
        np.array(min_p, np.float32),
        np.array([stream(seed + row) for row in range(len(asked))], np.uint64),
        np.arange(len(asked)) + seed,
    )


MIXED = [
    (0.0, 0, np.inf, 0.0),
    (1.0, 0, np.inf, 0.0),
    (0.7, 20, np.inf, 0.0),
    (0.7, 20, 0.8, 0.0),
    (1.0, 0, 0.95, 0.0),
    (1.3, 0, np.inf, 0.1),
    (0.5, 40, 0.9, 0.02),
]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_the_references_with_the_same_seeds_filters_and_masks(seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(len(MIXED), WIDTH) * 3
    words = torch.full((len(MIXED), -(-WIDTH // 32)), -1, dtype=torch.int32)
    words[::2] = torch.randint(-(2**31), 2**31 - 1, words[::2].shape).int()
    found = choose(logits.clone(), rows(MIXED, seed), words, SCRATCH)
    truth = reference.choose(logits.clone(), rows(MIXED, seed), words, SCRATCH)
    assert found[0].tolist() == truth[0].tolist()
    assert torch.equal(found[1], truth[1])
    assert calls == ["top_k", "top_p"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ([(0.0, 5, 0.5, 0.0)], []),
        ([(1.0, 0, np.inf, 0.1)], []),
        ([(1.0, 5, np.inf, 0.0)], ["top_k"]),
        ([(0.0, 5, np.inf, 0.0), (1.0, 0, 0.5, 0.0)], ["top_p"]),
    ],
)
def test_only_the_filters_that_a_row_asks_for_are_run(
    asked: list[tuple[float, int, float, float]], expected: list[str]
) -> None:
    choose(torch.randn(len(asked), WIDTH), rows(asked), None, SCRATCH)
    assert calls == expected


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_failed_says_so_and_leaves_the_others_alone(wrong: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, WIDTH)
    logits[1] = wrong
    asked = [(1.0, 20, 0.9, 0.0)] * 3
    tokens, best = choose(logits.clone(), rows(asked), None, SCRATCH)
    truth = reference.choose(logits.clone(), rows(asked), None, SCRATCH)
    assert tokens[::2].tolist() == truth[0][::2].tolist()
    assert torch.equal(best, truth[1]) or (best[1].isnan() and truth[1][1].isnan())
    assert 0 <= tokens[1] < WIDTH


def test_it_is_chosen_only_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Implementation(lambda *_: None)
    found = {"triton": {"choose": usual}, "flashinfer": {"choose": Implementation(choose, on_request=True)}}
    monkeypatch.setattr(registry, "operators", lambda backend: found.get(backend, {}))
    cuda = torch.device("cuda")
    assert operators.choose.on(cuda, torch.float32) is usual.run
    with override(choose="flashinfer"):
        assert operators.choose.on(cuda, torch.float32) is choose
    found["triton"] = {}
    assert operators.choose.on(cuda, torch.float32) is reference.choose


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        (False, "flashinfer needs a CUDA device"),
        (True, "flashinfer needs FlashInfer, whose module flashinfer is not installed"),
    ],
)
def test_a_request_is_refused_with_what_is_missing(
    gpu: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0" if gpu else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(flashinfer, "find_spec", lambda _name: None)
    monkeypatch.setattr(
        registry, "operators", lambda backend: flashinfer.operators() if backend == "flashinfer" else {}
    )
    with override(choose="flashinfer"), pytest.raises(KernelError, match=why):
        operators.choose.on(torch.device("cuda"), torch.float32)
