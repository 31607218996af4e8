"""Mixtures of experts in the fused decoder: transformers' arithmetic, a row's bits that do not depend on its
company, and what still runs layer by layer."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness
from family_models import make_family_folder
from hf import hf_logits, hf_model
from paged import PagedSequences, layer_by_layer
from tiny_adapters import make_adapter_folder
from tiny_models import VOCAB, model_folder

from personae.engine.loader import load_model
from personae.engine.lora_shapes import lora_shapes
from personae.engine.models.decoder import Decoder
from personae.engine.packed_weights import PackedWeights
from personae.kernels.cpu import operators
from personae.kernels.cpu.build import library
from personae.lora.peft import read_adapter
from personae.lora.pool import LoraPool
from personae.lora.segments import LoraBatch, lora_batch

pytestmark = pytest.mark.skipif("fuse" not in operators(), reason="no compiler, or no AVX2 on this machine")
CPU = torch.device("cpu")
INSTRUCTIONS = ("floats", "pairs", "tiles", "halves")  # as instructions.h numbers them
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ZOO: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"mlp_only_layers": [1]},
    "mixtral": {"head_dim": 32},
    "olmoe": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },  # norms over all heads, weights that do not add up to 1
    "qwen2_moe": {},  # a shared MLP, weighed by a gate
    "glm4_moe": {"hidden_size": 128, "head_dim": 64},  # sigmoid, groups, a dense layer
    "gpt_oss": {
        "hidden_size": 128,
        "head_dim": 64,
        "intermediate_size": 96,
        "sliding_window": 8,
    },  # sinks, biases, a clamped activation, windows
}
PROMPTS = [random.Random(seed).choices(range(VOCAB), k=40) for seed in range(3)]
PROMPT = PROMPTS[0]


def folder_of(family: str, path: Path) -> Path:
    if family in ("qwen3_moe", "mixtral", "olmoe"):
        return model_folder(family, torch_dtype="bfloat16", **ZOO[family])
    sizes = {"num_attention_heads": 2, "shared_expert_intermediate_size": 64, **ZOO[family]}
    return make_family_folder(path / family, family, **sizes)


def decoder_of(folder: Path, quantize: str | None = None, **more: Any) -> Decoder:
    decoder = load_model(folder, device=CPU, dtype="bfloat16", quantize=quantize, **more)
    assert decoder._fused is not None
    return decoder


def logits_of(decoder: Decoder, tokens: list[int] = PROMPT) -> torch.Tensor:
    hidden, _ = PagedSequences(decoder).forward({"a": tokens})
    return decoder.logits(hidden).clone()


def median_error(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Of the rows. Where two experts are nearly as good, rounding may choose the other one, so a few rows
    differ by more."""
    a, b = torch.cat(found), torch.cat(truth)
    return float(((a - b).norm(dim=1) / b.norm(dim=1)).median())


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("family", ZOO)
def test_logits_are_those_of_transformers_and_have_the_same_bits_in_any_company(
    family: str, quantize: str | None, tmp_path: Path
) -> None:
    folder = folder_of(family, tmp_path)
    if quantize is None:
        model = hf_model(folder)
        truth = [hf_logits(model, prompt) for prompt in PROMPTS]
    else:
        exact = load_model(folder, device=CPU, dtype="float32", quantize=quantize)
        truth = [logits_of(exact, prompt) for prompt in PROMPTS]
    decoder = decoder_of(folder, quantize)
    fused = [logits_of(decoder, prompt) for prompt in PROMPTS]
    with layer_by_layer(decoder):
        layered = [logits_of(decoder, prompt) for prompt in PROMPTS]
    error = median_error(fused, truth)
    assert error < (0.02 if quantize is None else 0.05)
    assert error < 1.2 * median_error(layered, truth)
    parts, at = PagedSequences(decoder, page_size=8, seed=1), 0
    for count in (1, 1, 7, 20, 10, 1):
        others = {f"{count} {at} {name}": PROMPT[name : name + 3] for name in range(3 if at else 0)}
        logits = parts.step({**others, "a": PROMPT[at : at + count]})["a"]
        at += count
        assert torch.equal(logits, fused[0][at - 1])
    assert at == len(PROMPT)


@pytest.mark.parametrize("instructions", ["floats", "pairs", "tiles", "halves"])
def test_sinks_windows_and_biases_are_the_same_with_any_instructions(
    instructions: str, tmp_path: Path
) -> None:
    folder, there = folder_of("gpt_oss", tmp_path), library()
    assert there is not None
    before, wanted = there.personae_instructions(-1), INSTRUCTIONS.index(instructions)
    try:
        if there.personae_instructions(wanted) != wanted:
            pytest.skip("not on this machine")
        decoder = decoder_of(folder)
        error = median_error([logits_of(decoder)], [hf_logits(hf_model(folder), PROMPT)])
        assert error < 0.02
        parts = PagedSequences(decoder, page_size=8, seed=1)
        chunks = PROMPT[:30], PROMPT[30:31], PROMPT[31:]
        rows = [parts.step({"a": chunk})["a"].clone() for chunk in chunks]
        whole = logits_of(decoder)
        assert all(torch.equal(row, whole[at]) for row, at in zip(rows, (29, 30, 39), strict=True))
    finally:
        there.personae_instructions(before)


def test_the_number_of_threads_does_not_show(tmp_path: Path) -> None:
    folder, before = folder_of("glm4_moe", tmp_path), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(logits_of(decoder_of(folder)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def test_adapters_on_attention_are_fused_and_those_on_experts_or_the_router_are_not(tmp_path: Path) -> None:
    folder = model_folder("qwen3_moe", torch_dtype="bfloat16")
    decoder = decoder_of(folder)
    shapes = lora_shapes(decoder)
    pool = LoraPool(shapes, capacity_rows=192, max_adapters=8, dtype=torch.bfloat16, device=CPU)
    targets: dict[str, dict[str, Any]] = {
        "attention": {"targets": ATTENTION},
        "router": {"targets": ["q_proj", "gate"]},
        "experts": {"targets": ["q_proj"], "target_parameters": ["experts.down_proj"]},
    }
    steps: dict[str, LoraBatch | None] = {"base": None}
    for name, each in targets.items():
        path = make_adapter_folder(tmp_path / name, folder, rank=5, scale=0.3, **each)
        slot = pool.load(read_adapter(path, shapes))
        pool.pin(pool.residents[-1])
        steps[name] = lora_batch(pool, [slot, None], [20, 20])
    assert {name for name, step in steps.items() if step and step.fused() is None} == {"router", "experts"}
    chunks = {"a": PROMPT[:20], "b": PROMPT[20:]}
    found = {name: PagedSequences(decoder).forward(chunks, step)[0] for name, step in steps.items()}
    assert found["attention"].dtype is torch.float32
    assert torch.equal(found["attention"][20:], found["base"][20:])
    with layer_by_layer(decoder):
        for name, step in steps.items():
            layered = PagedSequences(decoder).forward(chunks, step)[0].float()
            if name in ("router", "experts"):
                assert torch.equal(found[name].float(), layered)
            error = (found[name] - layered).norm(dim=1) / layered.norm(dim=1)
            assert float(error.median()) < 0.02
            if name != "base":
                changed = (layered[:20] - found["base"][:20]).norm() / layered[:20].norm()
                assert float(changed) > 0.05


def test_packed_experts_are_kept_for_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("personae.engine.packed_weights.LEAST_BYTES", 0)
    folder = folder_of("glm4_moe", tmp_path)
    starts = []
    for _ in range(2):
        packed = PackedWeights(tmp_path / "kept", 2**30)
        starts.append(logits_of(decoder_of(folder, packed=packed)))
        packed.written()
    assert torch.equal(*starts)
    assert len([*(tmp_path / "kept").iterdir()]) == 1


def test_experts_with_weighed_inputs_run_layer_by_layer(tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, "llama4")
    assert load_model(folder, device=CPU, dtype="bfloat16")._fused is None


def test_an_adapter_on_experts_changes_no_bit_of_other_rows(tmp_path: Path) -> None:
    folder = model_folder("qwen3_moe", torch_dtype="bfloat16")
    experts = {"targets": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    adapters = {
        "experts": make_adapter_folder(tmp_path / "experts", folder, rank=5, scale=0.3, **experts),
        "attention": make_adapter_folder(tmp_path / "attention", folder, rank=5, targets=ATTENTION),
    }

    def answers(*asked: tuple[str, str | None, list[int]]) -> dict[str, Any]:
        harness = EngineHarness(folder, adapters, dtype="bfloat16", max_batch_tokens=48)
        logs = [
            harness.log(id, prompt, adapter, max_tokens=12, logprobs=2, temperature=0.8, seed=len(id))
            for id, adapter, prompt in asked
        ]
        return {id: (one.tokens, one.logprobs) for id, one in harness.play(logs).items()}

    rows = [("base", None, PROMPTS[0]), ("on attention", "attention", PROMPTS[1])]
    together = answers(*rows, ("on experts", "experts", PROMPTS[2]))
    for row in rows:
        assert answers(row) == {row[0]: together[row[0]]}
    assert answers(("on experts", "experts", PROMPTS[2]))["on experts"][0] == together["on experts"][0]
    assert answers(("base", None, PROMPTS[2]))["base"] != together["on experts"]
