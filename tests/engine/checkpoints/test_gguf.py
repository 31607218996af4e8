"""GGUF files and transformers: each family, each type, what stays in its bits, parts, tokenizers."""

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import write_gguf
from hf import hf_logits, hf_model, relative_error
from paged import PagedSequences
from safetensors.torch import load_file
from tiny_models import SPECIALS, VOCAB, model_folder
from transformers import AutoModelForCausalLM

from personae.engine import loader
from personae.engine.checkpoints import open_checkpoint
from personae.engine.checkpoints.gguf.tensors import SERVED
from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.engine.quantization.gguf import METHODS
from personae.engine.tokens import Tokenizer
from personae.errors import ModelLoadError
from personae.kernels.quantized import QuantizedWeight
from personae.kernels.registry import optional

CPU = torch.device("cpu")
GEMMA: dict[str, Any] = {"sliding_window_pattern": 6, "num_hidden_layers": 7, "tie_word_embeddings": True}
FUSED = {"head_dim": 32}  # all layers run in one call, so that no product is oneDNN's
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "llama, heads of their own size": ("llama", {"head_dim": 24}),
    "llama, rope linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, yarn": (
        "qwen2",
        {
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        },
    ),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {**GEMMA, "query_pre_attn_scalar": 32}),
    "phi3": ("phi3", {}),
    "phi3, part of the head rotated": ("phi3", {"partial_rotary_factor": 0.75}),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layer_interval": 4}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
}
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
}  # K-quants' blocks
RARE = frozenset(  # i-quants, ternary types and floats of four bits
    {Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S}
    | {Type.IQ4_NL, Type.IQ4_XS, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4}
)
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
KEPT = sorted(Type[name] for name in METHODS)
ROUNDED_INPUTS = 0.1  # 255 levels are 0.006 of a product, and up to 0.06 of these random models' logits
PROMPT = random.Random(3).choices(range(VOCAB), k=60)


def all_logits(decoder: Decoder) -> torch.Tensor:
    hidden, _ = PagedSequences(decoder, page_size=8).forward({"a": PROMPT})
    return decoder.logits(hidden).clone()


def transformers_gguf(file: Path) -> torch.Tensor:
    """As transformers reads the file itself."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    return hf_logits(model.eval(), PROMPT)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_logits_of_the_folder_that_the_file_was_made_from(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    truth = tmp_path / "truth"
    file = write_gguf(tmp_path / "a.gguf", model_folder(family, **changes), Type.Q8_0, truth=truth)
    decoder = load_model(file, device=CPU, dtype="float32")
    assert relative_error(all_logits(decoder), hf_logits(hf_model(truth), PROMPT)) < 1e-4


@pytest.mark.parametrize(
    ("family", "changes"),  # which keep to what transformers reads from a file
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
        ("phi3", {"sliding_window": None}),
        ("gemma3", {**GEMMA, "head_dim": 256, "query_pre_attn_scalar": 256}),
    ],
)
def test_a_family_has_the_logits_of_transformers_own_reading(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "a.gguf", model_folder(family, **changes), Type.Q5_0)
    decoder = load_model(file, device=CPU, dtype="float32")
    assert relative_error(all_logits(decoder), transformers_gguf(file)) < 1e-3


@pytest.mark.parametrize("type", sorted(SERVED - RARE))
def test_a_type_has_the_logits_of_transformers_own_reading(type: Type, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", model_folder("llama", **WIDE), type)
    decoder = load_model(file, device=CPU, dtype="float32")
    assert relative_error(all_logits(decoder), transformers_gguf(file)) < 1e-3


def test_rarer_types_one_for_each_matrix_have_the_logits_of_transformers_own_reading(tmp_path: Path) -> None:
    matrices = (f"blk.{layer}.{name}" for layer in range(2) for name in MATRICES)
    types = dict(zip(matrices, sorted(RARE), strict=False))
    assert set(types.values()) == RARE
    file = write_gguf(
        tmp_path / "a.gguf",
        model_folder("llama", **WIDE),
        types=lambda name: types.get(name.removesuffix(".weight"), Type.Q8_0),
    )
    decoder = load_model(file, device=CPU, dtype="float32")
    assert relative_error(all_logits(decoder), transformers_gguf(file)) < 1e-3


@pytest.mark.parametrize("type", sorted(SERVED - RARE - {Type.F32, Type.F16}))
def test_bfloat16_is_the_exact_weight_rounded_once(type: Type, tmp_path: Path) -> None:
    truth = tmp_path / "truth"
    file = write_gguf(tmp_path / "a.gguf", model_folder("qwen3", **WIDE, head_dim=64), type, truth=truth)
    meant = load_file(truth / "model.safetensors")
    decoder = load_model(file, device=CPU, dtype="bfloat16")
    gate, up = (meant[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(decoder.layers[1].mlp.gate_up.plain(), torch.cat([gate, up]).bfloat16())
    assert torch.equal(decoder.embedding.plain(), meant["model.embed_tokens.weight"].bfloat16())


@pytest.mark.parametrize("family", ["llama", "granite"])  # in one call, and layer by layer
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("type", KEPT)
def test_what_stays_in_its_bits_has_the_files_values_and_answers_as_in_bfloat16(
    type: Type, tied: bool, family: str, tmp_path: Path
) -> None:
    if optional("pack_linear", CPU, torch.bfloat16) is None:
        pytest.skip("no product with blocks on this machine")
    sizes = {**WIDE, "head_dim": 64} if family == "llama" else WIDE
    file = write_gguf(tmp_path / "a.gguf", model_folder(family, tie_word_embeddings=tied, **sizes), type)
    kept, plain = load_model(file, device=CPU), load_model(file, device=CPU, dtype="bfloat16")
    assert (kept.quantization, plain.quantization) == (type.name, None)
    assert kept.dtype is torch.bfloat16
    tokens = torch.arange(VOCAB).flip(0)
    assert kept.embedding.in_bits == (optional("lookup", CPU, torch.bfloat16) is not None)
    assert torch.equal(kept.embedding(tokens), plain.embedding(tokens))
    assert torch.equal(kept.embedding.plain(), plain.embedding.plain())
    assert (kept.output.packed is kept.embedding.packed) == (tied and kept.embedding.in_bits)
    for one, other in zip(kept.layers, plain.layers, strict=True):
        for linear, same in zip(one.linears(), other.linears(), strict=True):
            assert torch.equal(linear.plain(), same.plain())
    assert relative_error(all_logits(kept), all_logits(plain)) < ROUNDED_INPUTS


def test_without_a_product_for_blocks_they_are_made_plain_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "a.gguf", model_folder("llama"), Type.Q4_0)
    monkeypatch.setattr("personae.engine.checkpoints.gguf.checkpoint.optional", lambda *_: None)
    for multiplies, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(loader, "multiplies_bfloat16", lambda _, there=multiplies: there)
        decoder = load_model(file, device=CPU)
        assert (decoder.quantization, decoder.dtype) == (None, dtype)


def test_modules_that_are_merged_here_may_have_different_types(tmp_path: Path) -> None:
    if optional("pack_linear", CPU, torch.bfloat16) is None:
        pytest.skip("no product with blocks on this machine")
    truth = tmp_path / "truth"
    mixed = {"attn_v": Type.Q8_0, "ffn_up": Type.Q5_1, "output": Type.F16}
    file = write_gguf(
        tmp_path / "a.gguf",
        model_folder("llama", **FUSED),
        types=lambda name: mixed.get(name.split(".")[-2], Type.Q4_1),
        truth=truth,
    )
    decoder, same = load_model(file, device=CPU), load_model(truth, device=CPU, dtype="bfloat16")
    assert decoder.quantization == "Q4_1"
    for one, other in zip(decoder.layers, same.layers, strict=True):
        for linear, plain in zip(one.linears(), other.linears(), strict=True):
            assert torch.equal(linear.plain(), plain.plain())
    assert relative_error(all_logits(decoder), all_logits(same)) < ROUNDED_INPUTS


def test_what_is_merged_here_of_types_within_q8_0_stays_in_that(tmp_path: Path) -> None:
    if optional("pack_linear", CPU, torch.bfloat16) is None:
        pytest.skip("no product with blocks on this machine")
    mixed = {"attn_q": Type.Q4_0, "attn_k": Type.IQ4_NL, "attn_v": Type.Q8_0}
    file = write_gguf(
        tmp_path / "a.gguf",
        model_folder("llama", **FUSED),
        types=lambda name: mixed.get(name.split(".")[-2], Type.Q5_0),
    )
    kept, plain = load_model(file, device=CPU), load_model(file, device=CPU, dtype="bfloat16")
    described = loader.describe(open_checkpoint(file), device=CPU, dtype="auto", quantize=None)
    places = dict(described.decoder().tensors())
    kinds = {name: place.kind for name, place in places.items() if isinstance(place, QuantizedWeight)}
    assert {kind for name, kind in kinds.items() if "self_attn.q" in name} == {"Q8_0"}
    assert {kind for name, kind in kinds.items() if "mlp" in name} == {"Q5_0"}
    for one, other in zip(kept.layers, plain.layers, strict=True):
        for linear, same in zip(one.linears(), other.linears(), strict=True):
            assert torch.equal(linear.plain(), same.plain())


def test_a_file_of_float32_is_run_in_that_and_one_of_float16_on_a_cpu_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda _: True)
    for type, dtype in ((Type.F32, torch.float32), (Type.F16, torch.bfloat16), (Type.BF16, torch.bfloat16)):
        file = write_gguf(tmp_path / f"{type.name}.gguf", model_folder("llama"), type)
        assert load_model(file, device=CPU).dtype is dtype


def test_weights_in_blocks_can_be_quantized_anew(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", model_folder("llama"), Type.Q8_0)
    assert load_model(file, device=CPU, quantize="int8").quantization == "int8"


def test_llama_3s_factors_stretch_the_rotary_embedding(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = model_folder("llama", rope_scaling=scaling)
    base = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    turns = 64 * base / (2 * np.pi)
    keep = np.clip((turns - 1.0) / 3.0, 0, 1)
    freqs = (1 / (keep + (1 - keep) / 8.0)).astype(np.float32)
    file = write_gguf(
        tmp_path / "a.gguf", folder, change=lambda writer: writer.add_tensor("rope_freqs.weight", freqs)
    )
    decoder = load_model(file, device=CPU)
    assert relative_error(all_logits(decoder), hf_logits(hf_model(folder), PROMPT)) < 1e-4
    plain = hf_logits(hf_model(model_folder("llama")), PROMPT)
    assert relative_error(all_logits(decoder), plain) > 1e-3


@pytest.mark.parametrize("context", [32, 512])
def test_phi_3s_factors_are_chosen_by_the_context(context: int, tmp_path: Path) -> None:
    short, long = (np.linspace(1, most, 8, dtype=np.float32) for most in (2, 8))
    scaling = {"type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}
    folder = model_folder(
        "phi3", rope_scaling=scaling, original_max_position_embeddings=64, max_position_embeddings=1024
    )

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(16) / np.log(64))))
        writer.add_tensor("rope_factors_long.weight", long)
        writer.add_tensor("rope_factors_short.weight", short)

    file = write_gguf(tmp_path / "a.gguf", folder, change=change)
    found, truth = (load_model(path, device=CPU, max_position=context) for path in (file, folder))
    prompt = {"a": PROMPT[:20]}
    one, other = (PagedSequences(decoder).step(prompt)["a"] for decoder in (found, truth))
    assert relative_error(one, other) < 1e-5


def test_a_model_in_parts_loads_from_its_first(tmp_path: Path) -> None:
    folder = model_folder("qwen3")
    whole = write_gguf(tmp_path / "whole.gguf", folder, Type.Q8_0)
    first = write_gguf(tmp_path / "parts.gguf", folder, Type.Q8_0, split=9)
    assert len(list(tmp_path.glob("parts-*"))) > 2
    assert torch.equal(*(all_logits(load_model(path, device=CPU)) for path in (whole, first)))
    with pytest.raises(ModelLoadError, match=r"is part 2 of \d; name the first part"):
        load_model(first.with_name(first.name.replace("-00001-", "-00002-")), device=CPU)
    first.with_name(first.name.replace("-00001-", "-00003-")).unlink()
    with pytest.raises(ModelLoadError, match=r"has missing parts: parts-00003-of-0000\d\.gguf"):
        load_model(first, device=CPU)


def test_a_folder_is_served_by_the_one_model_in_it(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a.gguf", model_folder("llama"), Type.Q8_0)
    (tmp_path / "mmproj-a.gguf").write_bytes(b"")
    assert torch.equal(*(all_logits(load_model(path, device=CPU)) for path in (file, tmp_path)))
    write_gguf(tmp_path / "b.gguf", model_folder("llama"), Type.Q8_0)
    with pytest.raises(ModelLoadError, match=r"has several models; name one of the files: a\.gguf, b\.gguf"):
        load_model(tmp_path, device=CPU)


def test_the_tokenizer_and_the_template_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = model_folder("llama")
    file = write_gguf(tmp_path / "a.gguf", folder)
    found, truth = Tokenizer.load(file), Tokenizer.load(folder)
    text = f"Who goes next? {SPECIALS[1]}user\n  Grüße, 你好 🙂  1234 can't{SPECIALS[2]}\n"
    assert found.encode(text) == truth.encode(text)
    assert found.decode(found.encode(text), False) == text
    assert found.special_ids == truth.special_ids
    assert (found.bos_id, found.pad_id) == (truth.bos_id, truth.pad_id)
    assert set(found.eos_ids) == {2, 0}
    assert found.chat_template == truth.chat_template
    assert open_checkpoint(file).generation_defaults(VOCAB).eos == found.eos_ids


def test_config_json_without_architectures_loads_by_its_model_type(tmp_path: Path) -> None:
    folder = model_folder("qwen3")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(*(all_logits(load_model(path, device=CPU)) for path in (folder, tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(ModelLoadError, match='model_type: "mamba" is not supported'):
        load_model(tmp_path, device=CPU)
