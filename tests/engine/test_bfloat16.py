"""In bfloat16 a CPU with AVX-512 says the same in any company, to the last bit of every logprob.

With the weights of the base in bfloat16, int8 and int4.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from engine_harness import EngineHarness, Played
from msgspec.structs import replace
from tiny_adapters import ZOO, make_adapter_folder
from tiny_models import VOCAB, model_folder

from personae.engine.sequence import SequenceLog
from personae.kernels.cpu import operators

pytestmark = pytest.mark.skipif(
    "fuse" not in operators(), reason="no compiler, or no AVX-512 on this machine"
)
VOICES = {
    "greedy": {"temperature": 0.0},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 11},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 13},
}
CAST = {"rank-1": 5, "rank-8-attention": 37, "rslora": 16, "rank-64": 150, None: 80}  # lengths of prompts


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def base(request: pytest.FixtureRequest) -> Path:
    return model_folder(request.param, torch_dtype="bfloat16", hidden_size=96)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    only = {"targets": ZOO["rank-8-attention"]["targets"]} if has_experts(base) else {}
    names = [name for name in CAST if name is not None]
    return {name: make_adapter_folder(root / name, base, **ZOO[name] | only) for name in names}


def has_experts(base: Path) -> bool:
    return "num_experts" in json.loads((base / "config.json").read_text())


def ensemble(harness: EngineHarness, salt: bytes = b"") -> list[SequenceLog]:
    return [
        harness.log(
            f"{voice} {name}",
            random.Random(length).choices(range(4, VOCAB), k=length),
            name,
            max_tokens=24,
            logprobs=2,
            salt=salt,
            **options,
        )
        for voice, options in VOICES.items()
        for name, length in CAST.items()
    ]


@pytest.fixture(scope="module", params=[None, "int8", "int4"])
def kept(request: pytest.FixtureRequest) -> dict[str, Any]:
    """How weights are kept."""
    return {"dtype": "bfloat16", "quantize": request.param}


@pytest.fixture(scope="module")
def solo(base: Path, adapters: dict[str, Path], kept: dict[str, Any]) -> dict[str, Played]:
    """Each alone, unchunked, from a cold cache, without lookahead."""
    harness = EngineHarness(base, adapters, lookahead=1, **kept)
    played: dict[str, Played] = {}
    for number in range(len(VOICES) * len(CAST)):
        played |= harness.play([ensemble(harness, bytes([number]))[number]])
    return played


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("mixed batch", {}),
        ("three steps ahead", {"lookahead": 3}),
        ("odd chunks", {"max_batch_tokens": 29}),
        ("few slots", {"max_seqs": 3}),
        ("small pages", {"page_size": 4}),
        ("preemption", {"num_pages": 20}),
    ],
)
def test_tokens_and_logprobs_have_the_same_bits_in_any_company(
    base, adapters, kept, solo, what, settings
) -> None:
    harness = EngineHarness(base, adapters, **kept, **settings)
    logs = ensemble(harness)
    random.Random(what).shuffle(logs)
    played = harness.play(logs)
    assert harness.scheduler.counters.preemptions > 0 or what != "preemption"
    for id, alone in solo.items():
        assert (played[id].tokens, played[id].logprobs) == (alone.tokens, alone.logprobs), id


def test_a_prefix_hit_brings_the_same_bits_as_a_cold_start(base, adapters, kept, solo) -> None:
    harness = EngineHarness(base, adapters, **kept)
    harness.play(ensemble(harness))
    warm = harness.play(ensemble(harness))
    assert sum(one.cached or 0 for one in warm.values()) > 0
    for id, alone in solo.items():
        assert (warm[id].tokens, warm[id].logprobs) == (alone.tokens, alone.logprobs), id


def test_a_log_taken_up_half_way_goes_on_with_the_same_bits(base, adapters, kept, solo) -> None:
    """As after a crash: the tokens so far are the log's, and everything else is computed anew."""
    harness = EngineHarness(base, adapters, **kept)
    resumed = []
    for log in ensemble(harness):
        said = solo[log.id].tokens[: len(log.id) % 11 + 4]
        resumed.append(replace(log, tokens=(*log.tokens, *said)))
    played = harness.play(resumed)
    for log in resumed:
        alone = solo[log.id]
        said = len(log.tokens) - log.prompt_length
        assert played[log.id].tokens == alone.tokens[said:]
        assert played[log.id].logprobs == alone.logprobs[said:]
