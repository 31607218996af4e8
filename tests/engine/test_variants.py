"""The variants of LoRA against PEFT: every one that is served, all of them in one batch."""

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness
from hf import hf_greedy, hf_logits, hf_model, quantized
from peft import PeftModel
from tiny_adapters import ALL_TARGETS, make_adapter
from tiny_models import VOCAB, model_folder

from personae.engine.quantization import QUANTIZATIONS
from personae.errors import AdapterError
from personae.lora.peft import read_adapter

INVOCATION = [7, 8, 9]
VARIANTS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "rank": 8},
    "dora-rslora-mlp": {
        "use_dora": True,
        "rank": 5,
        "rslora": True,
        "targets": ("gate_proj", "down_proj"),
        "layers": (0, 2),
    },
    "lora-bias": {"lora_bias": True, "rank": 4, "alpha": 12},
    "embedding": {"rank": 4, "targets": ("q_proj", "embed_tokens"), "scale": 0.5},
    "output": {"rank": 6, "targets": ("v_proj", "lm_head"), "scale": 0.5},
    "dora-everywhere": {
        "rank": 3,
        "use_dora": True,
        "targets": ("q_proj", "embed_tokens", "lm_head"),
        "scale": 0.5,
    },
    "output-bias": {"rank": 6, "targets": ("lm_head",), "lora_bias": True},
    "trained-tokens": {"rank": 4, "targets": ("o_proj",), "trainable_token_indices": [5, 77, 30]},
    "saved-in-full": {"rank": 4, "targets": ("up_proj",), "modules_to_save": ["lm_head", "embed_tokens"]},
    "alora": {"rank": 8, "alora_invocation_tokens": INVOCATION},
    "plain": {"rank": 8},
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{seed}/{length}").choices(range(4, VOCAB), k=length)


def saved(path: Path, base: Path, seed: int, **options: Any) -> Path:
    """A PEFT folder in which all that PEFT would train is random."""
    model = make_adapter(base, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_embedding_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        elif "magnitude" in name:
            parameter.data *= 1 + 0.3 * torch.rand(parameter.shape, generator=generator)
        elif name.endswith("lora_B.default.bias") or (name.endswith(".bias") and parameter.requires_grad):
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
        elif "trainable_tokens_delta" in name or "modules_to_save" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    return path


def of_family(family: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same for the modules that the family has: Phi-3's q, k and v are one, and gate and up."""
    if family != "phi3":
        return options
    merged = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
    names = [name.removesuffix("_proj") for name in options.get("targets", ALL_TARGETS)]
    found = {merged.get(name, name): None for name in names}
    ends = ("embed_tokens", "lm_head")
    return options | {"targets": tuple(name if name in ends else f"{name}_proj" for name in found)}


def loaded(base: Path, path: Path, quantize: str | None = None) -> PeftModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights, and of alora's generate
        model = PeftModel.from_pretrained(hf_model(base), path).eval()
    return (
        quantized(model, quantize) if quantize else model
    )  # now, since a file may bring its own copy of the base's matrix


def test_every_variant_on_a_base_in_fp8_is_that_of_peft_on_the_same_rounded_base(tmp_path: Path) -> None:
    # A number that is rounded may lie between two of E4M3, and which is taken is then a matter of 1e-7: a few
    # logprobs differ by what that is worth. A wrong adapter would differ at most positions.
    base = model_folder("llama")
    made = {
        name: saved(tmp_path / name, base, seed, **options)
        for seed, (name, options) in enumerate(VARIANTS.items())
    }
    harness = EngineHarness(base, made, quantize="fp8")
    cast: dict[str, list[int]] = {name: prompt(20 + 7 * i) for i, name in enumerate(made)}
    cast["alora"] = [*prompt(40), *INVOCATION, *prompt(20, 1), *INVOCATION, *prompt(3)]
    cast["trained-tokens"] = [5, 6, 77, 30, 78, 5, *prompt(9)]
    played = harness.play(
        [harness.log(name, tokens, name, max_tokens=2, prompt_logprobs=1) for name, tokens in cast.items()]
    )
    for name, tokens in cast.items():
        truth = torch.log_softmax(hf_logits(loaded(base, made[name], "fp8"), tokens), -1)
        errors = [
            abs(entry.logprob - float(truth[position - 1, tokens[position]]))
            for position, entry in enumerate(played[name].prompt_logprobs[1:], start=1)
            if entry is not None
        ]
        assert len(errors) == len(tokens) - 1
        assert sorted(errors)[len(errors) // 2] < 1e-5, name
        assert max(errors) < 0.5, name


@pytest.mark.parametrize(
    ("family", "changes", "more"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"int8": {"rank": 64}}),
        ("llama", {}, {"int4": {"rank": 64}}),
        (
            "llama",
            {"tie_word_embeddings": True},
            {"tied-plain": {"rank": 2, "targets": ("lm_head",), "scale": 2.0}},
        ),
        (
            "qwen2",
            {},
            {
                "biases": {"rank": 4, "targets": ("q_proj",), "bias": "lora_only"},
                "all-biases": {"rank": 4, "targets": ("q_proj",), "bias": "all"},
                "dora-biases": {"rank": 4, "targets": ("q_proj", "v_proj"), "use_dora": True, "bias": "all"},
            },
        ),
        ("mimo", {}, {}),
        ("phi3", {}, {}),
        ("smollm3", {}, {}),
        ("granite", {}, {}),
        ("olmo3", {}, {}),
        ("gemma3", {}, {}),
    ],
    ids=["llama", "int8", "int4", "tied", "qwen2", "mimo", "phi3", "smollm3", "granite", "olmo3", "gemma3"],
)
def test_all_variants_in_one_batch_continue_as_in_peft(
    family: str, changes: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    base = model_folder(family, **changes)
    made = {
        name: saved(tmp_path / name, base, seed, **of_family(family, options))
        for seed, (name, options) in enumerate({**VARIANTS, **more}.items())
    }
    quantize = next((kept for kept in QUANTIZATIONS if kept in made), None)
    harness = EngineHarness(base, made, quantize=quantize)
    cast: dict[str, list[int]] = {name: prompt(20 + 7 * i) for i, name in enumerate(made)}
    cast["alora"] = [*prompt(40), *INVOCATION, *prompt(20, 1), *INVOCATION, *prompt(3)]
    cast["trained-tokens"] = [5, 6, 77, 30, 78, 5, *prompt(9)]
    logs = [
        harness.log(name, tokens, name, max_tokens=24, prompt_logprobs=1) for name, tokens in cast.items()
    ]
    logs.append(harness.log("base", prompt(33), max_tokens=24))
    random.Random(family).shuffle(logs)
    played = harness.play(logs)
    assert played["base"].tokens == hf_greedy(
        quantized(hf_model(base), quantize) if quantize else hf_model(base), prompt(33), 24
    )
    for name, tokens in cast.items():
        model = loaded(base, made[name], quantize)
        assert played[name].tokens == hf_greedy(model, tokens, 24), name
        truth = torch.log_softmax(hf_logits(model, tokens), -1)
        for position, entry in enumerate(played[name].prompt_logprobs[1:], start=1):
            assert entry is not None
            expected = float(truth[position - 1, tokens[position]])
            assert entry.logprob == pytest.approx(expected, rel=1e-4, abs=1e-4), (name, position)
        if name != "alora":
            assert played[name].tokens != harness.play([harness.log("b", tokens, max_tokens=24)])["b"].tokens


def test_activated_lora_shares_the_cache_of_the_base_in_both_directions(tmp_path: Path) -> None:
    base = model_folder("llama")
    made = {
        "alora": saved(tmp_path / "alora", base, 1, **VARIANTS["alora"]),
        "other": saved(tmp_path / "other", base, 2, **VARIANTS["alora"]),
    }
    harness = EngineHarness(base, made)
    model, tuned = hf_model(base), loaded(base, made["alora"])

    def turn(tokens: list[int], adapter: str | None) -> tuple[list[int], int]:
        played = harness.play([harness.log("t", tokens, adapter, max_tokens=24)])["t"]
        truth = model if adapter is None else tuned if adapter == "alora" else loaded(base, made[adapter])
        assert played.tokens == hf_greedy(truth, tokens, 24)
        return played.tokens, played.cached or 0

    first = prompt(70)
    answer, cached = turn(first, None)
    assert cached == 0
    asked = [*first, *answer, *INVOCATION]
    judged, cached = turn(asked, "alora")
    assert cached >= (len(first) + 23) // 16 * 16, "the base's answer is a prefix of the adapter's prompt"
    again, cached = turn(asked, "alora")
    assert (again, cached) == (judged, len(asked) - 1), "its own pages are found too"
    _, cached = turn(asked, "other")
    assert cached == len(first) + len(answer), "as far as the base's, and no token of another adapter's"
    _, cached = turn([*asked, *prompt(9, 3)], None)
    assert cached == len(first) + len(answer), "what the adapter computed is not the base's"
    second = [*asked, *judged, *prompt(40, 4), *INVOCATION]
    _, cached = turn(second, "alora")
    assert cached == len(asked), "what was behind one invocation is before the next, and the base's"
    _, cached = turn([*second[:-3], *prompt(5, 5)], None)
    assert cached == len(second) - 3, "what it computed before its invocation is the base's"


def test_an_activated_adapter_gives_the_same_in_chunks_as_whole(tmp_path: Path) -> None:
    base = model_folder("llama")
    made = {"alora": saved(tmp_path / "alora", base, 1, **VARIANTS["alora"])}
    text = [*prompt(61), *INVOCATION, *prompt(25, 1)]
    found = set()
    for settings in ({}, {"max_batch_tokens": 16}, {"page_size": 4}, {"lookahead": 1}):
        harness = EngineHarness(base, made, **settings)
        found.add(tuple(harness.play([harness.log("a", text, "alora")])["a"].tokens))
    assert len(found) == 1


def test_a_prompt_without_the_invocation_is_the_bases(tmp_path: Path) -> None:
    base = model_folder("llama")
    made = {"alora": saved(tmp_path / "alora", base, 1, **VARIANTS["alora"])}
    harness = EngineHarness(base, made)
    log = harness.log("a", prompt(30), "alora", max_tokens=16)
    assert harness.play([log])["a"].tokens == hf_greedy(loaded(base, made["alora"]), prompt(30), 16)


def test_an_adapter_whose_dora_divides_by_zero_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    base = model_folder("llama")
    path = saved(tmp_path / "dora", base, 1, **VARIANTS["dora"])
    harness = EngineHarness(base)
    weight = harness.engine.worker.model.layers[1].attention.o.plain()
    adapter = read_adapter(path, harness.shapes)
    pair = adapter.pairs[1, "o"]
    weight[3] = 0
    pair.b[:, 3] = 0
    with pytest.raises(AdapterError, match="a row of the changed weight is zero"):
        harness.engine.worker.place(adapter)
    pool = harness.engine.worker.adapters
    pool.check_integrity()
    assert not pool.residents
    assert not pool.deltas


def test_the_memory_of_extras_is_given_back_and_bounded(tmp_path: Path) -> None:
    base = model_folder("llama")
    harness = EngineHarness(base)
    pool = harness.engine.worker.adapters
    names = ("dora", "saved-in-full", "embedding")
    made = [read_adapter(saved(tmp_path / name, base, 1, **VARIANTS[name]), harness.shapes) for name in names]
    most = max(adapter.extra_bytes(harness.shapes) for adapter in made)
    pool.bounds = replace(pool.bounds, max_extra=most)
    for adapter in (*made, *made):
        pool.load(adapter)
        used = sum(resident.extra for resident in pool._residents.values())
        assert used <= most
        pool.check_integrity()
    for digest in pool.residents:
        pool.unload(digest)
    assert not pool.deltas
    pool.bounds = replace(pool.bounds, max_extra=100)
    with pytest.raises(AdapterError, match="DoRA: this needs"):
        pool.load(made[0])
