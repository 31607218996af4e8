"""Mixtures of experts: adapters on their attention, what they take, what is refused of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness
from hf import hf_greedy, hf_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter_folder
from tiny_models import VOCAB, make_model_folder, model_folder

from personae.engine.layers.moe import MoE
from personae.engine.loader import load_model
from personae.engine.lora_shapes import lora_shapes
from personae.engine.quantization.base import LinearMethod
from personae.errors import AdapterError, ModelLoadError
from personae.kernels import reference
from personae.kernels.registry import optional
from personae.lora.peft import read_adapter
from personae.lora.peft_names import TENSORS_FILE

CPU = torch.device("cpu")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MIXTURES = ["qwen3_moe", "mixtral", "olmoe"]


def edit_config(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
    return folder


@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_on_attention_and_the_base_continue_in_one_batch_as_in_peft(
    family: str, tmp_path: Path
) -> None:
    base = model_folder(family, mlp_only_layers=[1]) if family == "qwen3_moe" else model_folder(family)
    options: dict[str, dict[str, Any]] = {
        "all": {"rank": 8, "seed": 1},
        "dora": {"rank": 5, "seed": 2, "use_dora": True},
    }
    adapters = {
        name: make_adapter_folder(tmp_path / name, base, targets=ATTENTION, scale=0.3, **each)
        for name, each in options.items()
    }
    harness = EngineHarness(base, adapters)
    prompts = {"all": [*range(30, 60)], "dora": [9, 8, 7], None: [*range(100, 117)]}
    played = harness.play(
        [harness.log(str(name), prompt, name, max_tokens=24) for name, prompt in prompts.items()]
    )
    assert played["None"].tokens == hf_greedy(hf_model(base), prompts[None], 24)
    for name, folder in adapters.items():
        model = PeftModel.from_pretrained(hf_model(base), folder).eval()
        assert played[name].tokens == hf_greedy(model, prompts[name], 24)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("mlp.experts.3.gate_proj", "its lora_B is missing"),
        ("mlp.experts", "target_parameters must name either gate_up_proj or down_proj"),
        ("mlp.gate", "the config's target_modules excludes"),
        ("mlp.shared_expert.up_proj", "the base has no such experts or router"),
    ],
)
def test_lora_on_experts_that_does_not_fit_is_refused_by_name(module: str, why: str, tmp_path: Path) -> None:
    base = model_folder("qwen3_moe")
    folder = make_adapter_folder(tmp_path / "a", base, targets=ATTENTION)
    name = f"base_model.model.model.layers.0.{module}.lora_A.weight"
    tensors = load_file(folder / TENSORS_FILE)
    save_file(tensors | {name: torch.ones(8, 64)}, folder / TENSORS_FILE)
    with pytest.raises(AdapterError, match=why) as refused:
        read_adapter(folder, lora_shapes(load_model(base, device=CPU)))
    assert refused.value.param == name


def test_where_some_layers_are_dense_adapters_change_their_mlp_and_no_other_layers(tmp_path: Path) -> None:
    base = model_folder("qwen3_moe", mlp_only_layers=[1])
    shapes = lora_shapes(load_model(base, device=CPU))
    assert shapes.sites["down"].layers == frozenset([1])
    assert shapes.sites["expert_down"].layers == frozenset([0, 2])
    assert shapes.sites["q"].layers is None
    targets = r".*self_attn\.q_proj|.*\.1\.mlp\.down_proj"
    folder = make_adapter_folder(tmp_path / "a", base, targets=targets, scale=0.5)
    harness = EngineHarness(base, {"a": folder})
    prompt = [*range(70, 90)]
    played = harness.play([harness.log("a", prompt, "a", max_tokens=24)])
    model = PeftModel.from_pretrained(hf_model(base), folder).eval()
    assert played["a"].tokens == hf_greedy(model, prompt, 24)
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    save_file(load_file(folder / TENSORS_FILE) | {name: torch.ones(8, 96)}, folder / TENSORS_FILE)
    with pytest.raises(AdapterError, match=r"layer 0 of the base has no mlp\.down_proj that adapters"):
        read_adapter(folder, shapes)


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_the_memory_that_a_model_needs_counts_its_experts(
    quantize: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, many = (
        make_model_folder(tmp_path / f"{count}", "qwen3_moe", num_experts=count, num_experts_per_tok=1)
        for count in (1, 9)
    )
    small = load_model(few, device=CPU, quantize=quantize).nbytes
    grown = load_model(many, device=CPU, quantize=quantize).nbytes - small
    experts = 8 * 3 * 3 * 32 * 64  # layers, matrices, their sizes
    router = 8 * 3 * 64 * 4
    if quantize is None:
        assert grown == experts * 4 + router
    else:
        assert 0.5 * experts < grown - router < 0.75 * experts  # four and a half bits, scales
    monkeypatch.setattr("personae.engine.loader.free_memory", lambda: small)
    with pytest.raises(ModelLoadError, match="The weights need"):
        load_model(many, device=CPU, quantize=quantize)


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok: 7 is more than the 6 experts"),
        ("mixtral", {"num_local_experts": ...}, "num_experts: is missing"),
        ("qwen3_moe", {"moe_intermediate_size": ...}, "moe_intermediate_size: is missing"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: is not supported"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_its_field(
    family: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    folder = edit_config(make_model_folder(tmp_path, family), **fields)
    with pytest.raises(ModelLoadError, match=why):
        load_model(folder, device=CPU)


def test_an_expert_that_is_missing_from_the_file_is_named(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path, "mixtral")
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del weights[name]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"missing: {name}"):
        load_model(folder, device=CPU)


def test_packed_experts_can_be_had_back() -> None:
    folder = model_folder("qwen3_moe", torch_dtype="bfloat16")
    block = load_model(folder, device=CPU).layers[2].mlp
    assert isinstance(block, MoE)
    stored = load_file(folder / "model.safetensors")
    for expert in (0, 5):
        prefix, rows = f"model.layers.2.mlp.experts.{expert}", slice(expert * 64, expert * 64 + 64)
        pair = torch.cat([stored[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up")])
        assert torch.equal(block.gate_up.plain()[rows], pair)
        assert torch.equal(block.down.plain()[rows], stored[f"{prefix}.down_proj.weight"])


@pytest.mark.skipif(optional("pack_linear", CPU, torch.bfloat16) is None, reason="no backend packs weights")
def test_the_plain_weights_of_packed_experts_are_freed() -> None:
    block = load_model(model_folder("qwen3_moe", torch_dtype="bfloat16"), device=CPU).layers[2].mlp
    assert isinstance(block, MoE)
    for linear in (block.gate_up, block.down):
        assert not [value for value in vars(linear).values() if isinstance(value, LinearMethod)]


@pytest.mark.parametrize("renormalize", [False, True])
def test_the_router_takes_the_likeliest_experts(renormalize: bool) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0], [0.0, 0.0, 5.0, 4.0]])
    weights, experts = reference.route(logits, 2, renormalize)
    assert experts.tolist() == [[1, 2], [2, 3]]
    p = logits.double().exp() / logits.double().exp().sum(1, keepdim=True)
    chosen = p.gather(1, experts)
    truth = chosen / chosen.sum(1, keepdim=True) if renormalize else chosen
    torch.testing.assert_close(weights.double(), truth, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_experts_say_is_summed_by_token_wherever_their_rows_lie(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    said = torch.randn(5, 3, 16, generator=generator).to(dtype)
    weights = torch.rand(5, 3, generator=generator)
    order = torch.randperm(15, generator=generator)
    found = reference.combine(said.flatten(0, 1)[order], weights, order)
    truth = (said.double() * weights.double().unsqueeze(-1)).sum(1)
    assert found.dtype == dtype
    tolerance = 8e-3 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(found.double(), truth, atol=tolerance, rtol=tolerance)


def test_a_token_outside_of_the_vocabulary_is_no_experts_business() -> None:
    harness = EngineHarness(model_folder("olmoe"))
    with pytest.raises(ValueError, match="vocabulary"):
        harness.play([harness.log("a", [VOCAB], max_tokens=1)])
