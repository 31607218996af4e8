"""The engine as a whole against Hugging Face transformers and PEFT, and against itself in other company."""

import random
from pathlib import Path

import pytest
import torch
from engine_harness import EngineHarness, Played
from hf import hf_greedy, hf_logits, hf_model
from msgspec.structs import replace
from peft import PeftModel
from tiny_adapters import ZOO, make_zoo
from tiny_models import VOCAB, model_folder

LENGTHS = [1, 2, 15, 16, 17, 33, 64, 150, 300]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(4, VOCAB), k=length)


@pytest.fixture(scope="module")
def base() -> Path:
    return model_folder("qwen3")


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_zoo(tmp_path_factory.mktemp("adapters"), base)


@pytest.fixture(scope="module")
def harness(base: Path, adapters: dict[str, Path]) -> EngineHarness:
    return EngineHarness(base, adapters)


@pytest.fixture(scope="module")
def peft(base: Path, adapters: dict[str, Path]) -> dict[str | None, object]:
    models: dict[str | None, object] = {None: hf_model(base)}
    for name, path in adapters.items():
        models[name] = PeftModel.from_pretrained(hf_model(base), path).eval()
    return models


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_eight_different_adapters_and_the_base_in_one_batch_continue_as_in_peft(family, tmp_path) -> None:
    folder = model_folder(family)
    made = make_zoo(tmp_path, folder)
    harness = EngineHarness(folder, made)
    cast = [*ZOO, None]
    logs = [
        harness.log(f"{name}", prompt(length), name, max_tokens=64)
        for name, length in zip(cast, LENGTHS, strict=True)
    ]
    random.Random(1).shuffle(logs)
    played = harness.play(logs)
    for name, length in zip(cast, LENGTHS, strict=True):
        model = hf_model(folder)
        if name is not None:
            model = PeftModel.from_pretrained(model, made[name]).eval()
        assert played[f"{name}"].tokens == hf_greedy(model, prompt(length), 64), name


def test_logprobs_of_prompt_and_answer_are_those_of_peft(harness, peft) -> None:
    cast = [*ZOO, None]
    played = harness.play(
        harness.log(f"{name}", prompt(40, seed=2), name, max_tokens=4, prompt_logprobs=3, logprobs=2)
        for name in cast
    )
    for name in cast:
        one = played[f"{name}"]
        tokens = prompt(40, seed=2) + one.tokens
        truth = torch.log_softmax(hf_logits(peft[name], tokens), -1)
        entries = [*one.prompt_logprobs, *one.logprobs]
        assert entries[0] is None
        assert len(entries) == len(tokens)
        for position, entry in enumerate(entries[1:], start=1):
            row = truth[position - 1]
            assert entry is not None
            assert entry.token == tokens[position]
            assert entry.logprob == pytest.approx(float(row[tokens[position]]), rel=1e-4, abs=1e-4)
            assert [token for token, _ in entry.top] == row.topk(len(entry.top)).indices.tolist()
            assert entry.rank == 1 + int((row > row[tokens[position]]).sum())


VOICES = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 11},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 13},
}


def ensemble(harness: EngineHarness, **changes: object) -> list:
    return [
        harness.log(
            f"{voice}-{name}-{length}", prompt(length, seed=3), name, max_tokens=24, **options, **changes
        )
        for voice, options in VOICES.items()
        for name, length in (("rank-8-attention", 37), ("rslora", 16), (None, 80), ("rank-1", 5))
    ]


@pytest.fixture(scope="module")
def solo(base: Path, adapters: dict[str, Path]) -> dict[str, Played]:
    """Each alone, unchunked, from a cold cache, without lookahead."""
    played: dict[str, Played] = {}
    harness = EngineHarness(base, adapters, lookahead=1)
    for number, log in enumerate(ensemble(harness)):
        (alone,) = ensemble(harness, salt=bytes([number]))[number : number + 1]
        played |= harness.play([alone])
        assert played[log.id].cached == 0
    return played


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("mixed batch", {}),
        ("no lookahead", {"lookahead": 1}),
        ("three steps ahead", {"lookahead": 3}),
        ("small chunks", {"max_batch_tokens": 16}),
        ("odd chunks", {"max_batch_tokens": 29}),
        ("few slots", {"max_seqs": 3}),
        ("small pages", {"page_size": 4}),
        ("preemption", {"num_pages": 14}),
    ],
)
def test_tokens_are_the_same_in_any_company(base, adapters, solo, what, settings) -> None:
    harness = EngineHarness(base, adapters, **settings)
    logs = ensemble(harness)
    random.Random(what).shuffle(logs)
    played = harness.play(logs)
    if what == "preemption":
        assert harness.scheduler.counters.preemptions > 0
    assert {id: one.tokens for id, one in played.items()} == {id: one.tokens for id, one in solo.items()}


def test_a_prefix_hit_brings_the_same_tokens_as_a_cold_start(base, adapters, solo) -> None:
    harness = EngineHarness(base, adapters)
    harness.play(ensemble(harness))
    warm = harness.play(ensemble(harness))
    assert {id: one.tokens for id, one in warm.items()} == {id: one.tokens for id, one in solo.items()}
    assert sum(one.cached or 0 for one in warm.values()) > 0
    assert all(one.cached == len(p) - 1 for one, p in ((warm["greedy-rslora-16"], prompt(16)),))


def test_a_tenant_and_an_adapter_never_hit_the_pages_of_another(base, adapters) -> None:
    harness = EngineHarness(base, adapters)
    text = prompt(64, seed=5)
    harness.play([harness.log("first", text, "rslora", salt=b"a")])
    again = harness.play(
        [
            harness.log("same", text, "rslora", salt=b"a"),
            harness.log("other tenant", text, "rslora", salt=b"b"),
            harness.log("other adapter", text, "rank-1", salt=b"a"),
            harness.log("base", text, None, salt=b"a"),
        ]
    )
    assert {id: one.cached for id, one in again.items()} == {
        "same": 63,
        "other tenant": 0,
        "other adapter": 0,
        "base": 0,
    }


def test_siblings_share_the_prompt_and_differ_by_seed(base) -> None:
    harness = EngineHarness(base)
    text = prompt(50, seed=6)
    played = harness.play(
        harness.log(f"{i}", text, seed=i, temperature=1.5, after=None if i == 0 else "0") for i in range(4)
    )
    assert len({tuple(one.tokens) for one in played.values()}) == 4
    assert [played[f"{i}"].cached for i in range(1, 4)] == [48, 48, 48]


def test_a_row_whose_logits_are_not_finite_fails_alone(base) -> None:
    harness = EngineHarness(base)
    embedding = harness.engine.worker.model.embedding.plain()
    poisoned = 499
    embedding[poisoned] = torch.nan
    played = harness.play(
        [harness.log("ill", [5, poisoned, 7]), harness.log("well", [t for t in prompt(30) if t != poisoned])]
    )
    assert played["ill"].finish == "error"
    assert played["ill"].error == "the model's logits are not finite"
    assert played["well"].finish == "length"


def test_a_row_whose_adapter_is_not_on_the_device_stops_the_step_and_is_not_served_by_the_base() -> None:
    harness = EngineHarness(model_folder("qwen3"))
    with pytest.raises(RuntimeError, match="not on the device"):
        harness.play([replace(harness.log("a", range(4, 20)), adapter="f" * 64)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # bfloat16: the native decoder, where there is one
@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_a_token_that_is_not_in_the_vocabulary_reaches_no_kernel(base: Path, dtype: str, token: int) -> None:
    harness = EngineHarness(base, dtype=dtype)
    with pytest.raises(ValueError, match="Sequence strange has a token id"):
        harness.play([harness.log("strange", [5, token, 6])])
    assert bool(torch.isnan(harness.engine.worker.kv.data).all())  # nothing was computed
