"""The sampling kernels in the interpreter, against the slow sampler and the noise's own definition."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from slow_sampler import bitmask, changed_logits, may_choose

from personae.engine.params import SamplingParams
from personae.engine.plan import NOT_FINITE, NOTHING_ALLOWED
from personae.engine.sampled_tokens import TokenChoices
from personae.engine.sampler import Sampler
from personae.engine.sequence import SequenceLog
from personae.kernels import registry
from personae.kernels.counter_rng import stream, uniforms
from personae.kernels.triton import sampling as host
from personae.kernels.triton.calls import TritonOperators
from personae.kernels.triton.device.sampling import uniform
from personae.kernels.triton.sizes import Gpu

OURS = TritonOperators(Gpu(1, hopper=True))
# The interpreter works on NumPy's numbers, which warn where a GPU's wrap around or give infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|All-NaN):RuntimeWarning")


@pytest.fixture(autouse=True)
def _in_the_samplers_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        registry, "operators", lambda _backend: {"choose": registry.Implementation(OURS.choose)}
    )


@pytest.fixture
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CHUNK", 64)


def log(**params: Any) -> SequenceLog:
    return SequenceLog("s", (0,), 1, SamplingParams(**({"max_tokens": 100, "seed": 0} | params)))


def sample(
    logits: np.ndarray, logs: Sequence[SequenceLog], positions: Sequence[int], allowed: Any = None
) -> TokenChoices:
    sampler = Sampler(len(logs), logits.shape[1], "cpu")
    for slot, one in enumerate(logs):
        sampler.admit(slot, one)
    mask = None if allowed is None else torch.from_numpy(bitmask(allowed, logits.shape[1]))
    return sampler.sample(torch.from_numpy(logits.copy()), range(len(logs)), positions, mask).read()


@triton.jit
def _uniforms(streams_ptr, positions_ptr, out_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(out_ptr + i, uniform(tl.load(streams_ptr + i), tl.load(positions_ptr + i)))


def test_the_noise_is_the_hosts_bit_for_bit() -> None:
    seeds = [0, 1, 2, -1, 2**63, 2**64 - 1, 12345678901234567890, 7] * 4
    streams = np.array([stream(seed) for seed in seeds])
    positions = np.array([0, 1, 31, 2**31, 2**40, 5, 6, 2**62] * 4) + np.arange(32)
    out = torch.empty(32, dtype=torch.float64)
    _uniforms[(1,)](torch.from_numpy(streams.view(np.int64)), torch.from_numpy(positions), out, COUNT=32)
    assert out.tolist() == uniforms(streams, positions).tolist()


VOICES = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3, "seed": 5},
    "top k": {"top_k": 7, "seed": 1},
    "top k of ties": {"top_k": 40, "temperature": 2.0, "seed": 2},
    "nucleus": {"top_p": 0.9, "temperature": 1.5, "seed": 3},
    "hardly a nucleus": {"top_p": 0.01, "seed": 4},
    "nearly all": {"top_p": 0.999, "temperature": 2.0},
    "least": {"min_p": 0.2, "seed": 6},
    "all at once": {"top_k": 30, "top_p": 0.8, "min_p": 0.02, "temperature": 1.2, "seed": 7},
}


@pytest.mark.usefixtures("_short_chunks")
@pytest.mark.parametrize(("vocab", "rounding"), [(5, 1000), (130, 1), (200, 1000)])
def test_it_chooses_what_a_slow_sampler_chooses(vocab: int, rounding: int) -> None:
    random = np.random.default_rng(vocab + rounding)
    logs = [log(**voice) for voice in VOICES.values()]
    logits = (np.round(random.normal(0, 3, (len(logs), vocab)) * rounding) / rounding).astype(np.float32)
    allowed = [random.random(vocab) < 0.5 if row % 3 == 1 else None for row in range(len(logs))]
    positions = random.integers(1, 1000, len(logs)).tolist()
    found = sample(logits, logs, positions, allowed)
    for row, (name, one) in enumerate(zip(VOICES, logs, strict=True)):
        x = changed_logits(logits[row], one, allowed[row])
        if np.isneginf(x.max()):
            assert found.failures[row] == NOTHING_ALLOWED
        else:
            assert found.tokens[row] in may_choose(x, one.params, positions[row]), name


@pytest.mark.usefixtures("_short_chunks")
def test_a_rows_token_is_the_same_alone_and_in_company() -> None:
    random = np.random.default_rng(1)
    logs = [log(**voice) for voice in VOICES.values()]
    wide = random.normal(0, 2, (len(logs), 200)).astype(np.float32)
    together = sample(wide, logs, [9] * len(logs)).tokens
    for row in (0, 4, 9):
        assert sample(wide[row : row + 1], [logs[row]], [9]).tokens == together[row : row + 1]


@pytest.mark.usefixtures("_short_chunks")
def test_rows_that_cannot_go_on_fail_alone() -> None:
    logits = np.zeros((5, 130), np.float32)
    logits[0, 100] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    logits[4, 77] = 9
    allowed = [None, None, None, np.zeros(130, np.bool_), None]
    found = sample(logits, [log(top_p=0.5, top_k=3)] * 5, [1] * 5, allowed)
    assert found.failures == {0: NOT_FINITE, 1: NOT_FINITE, 2: NOTHING_ALLOWED, 3: NOTHING_ALLOWED}
    assert found.tokens == [None, None, None, None, 77]


def test_a_vocabulary_too_wide_for_one_program_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "MOST_CHUNKS", 0)
    monkeypatch.setattr(host, "choose", None)
    assert sample(np.array([[0, 3, 1]], np.float32), [log(temperature=0.0)], [1]).tokens == [1]
