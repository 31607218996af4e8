"""Adapters on experts, their router and shared experts, as PEFT writes them, in one batch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import EngineHarness
from family_models import make_family_folder
from hf import hf_greedy, hf_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_adapters import make_adapter_folder
from tiny_models import VOCAB, model_folder

from personae.engine.loader import load_model
from personae.engine.lora_shapes import lora_shapes
from personae.errors import AdapterError
from personae.lora.mix import mixed
from personae.lora.peft import read_adapter
from personae.lora.peft_names import CONFIG_FILE, TENSORS_FILE

# PEFT warns that rank_pattern's key for experts matches no module, and then applies it to the parameter.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
CPU = torch.device("cpu")
BOTH = ["experts.gate_up_proj", "experts.down_proj"]


def base_of(family: str, path: Path) -> Path:
    if family in ("qwen3_moe", "mixtral", "olmoe"):
        return model_folder(family)
    return make_family_folder(path / "base", family)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_experts_and_the_base_continue_in_one_batch_as_in_peft(
    family: str, tmp_path: Path
) -> None:
    base = base_of(family, tmp_path)
    options: dict[str, dict[str, Any]] = {
        "both": {"rank": 3, "targets": ["q_proj"], "target_parameters": BOTH},
        "gate_up": {"rank": 9, "targets": [], "target_parameters": BOTH[:1]},
        "down": {"rank": 4, "targets": ["o_proj"], "target_parameters": BOTH[1:]},
        "attention": {"rank": 5, "targets": ["q_proj", "v_proj"]},
        "all": {"rank": 6, "targets": "all-linear"},
    }
    adapters = {
        name: make_adapter_folder(tmp_path / name, base, scale=0.5, seed=index, **each)
        for index, (name, each) in enumerate(options.items())
    }
    harness = EngineHarness(base, adapters)
    prompts = {
        str(name): [(31 * seed + 7 * place) % VOCAB for place in range(length)]
        for seed, (name, length) in enumerate(zip([*adapters, None], (20, 7, 33, 11, 15, 18), strict=True))
    }
    played = harness.play(
        [
            harness.log(name, prompt, name if name in adapters else None, max_tokens=12)
            for name, prompt in prompts.items()
        ]
    )
    plain = hf_model(base)
    assert played["None"].tokens == hf_greedy(plain, prompts["None"], 12)
    changed = 0
    for name, folder in adapters.items():
        truth = hf_greedy(PeftModel.from_pretrained(hf_model(base), folder).eval(), prompts[name], 12)
        assert played[name].tokens == truth, name
        changed += truth != hf_greedy(plain, prompts[name], 12)
    assert changed >= 4


def test_sixteen_adapters_on_experts_continue_in_one_batch_as_in_peft(tmp_path: Path) -> None:
    base = base_of("qwen3_moe", tmp_path)
    adapters = {
        f"{seed:x}": make_adapter_folder(
            tmp_path / f"{seed:x}",
            base,
            rank=1 + seed % 7,
            seed=seed,
            scale=0.5,
            targets=[],
            target_parameters=own,
        )
        for seed, own in enumerate([BOTH, BOTH[:1], BOTH[1:], BOTH] * 4)
    }
    harness = EngineHarness(base, adapters)
    prompts = {name: [(31 * int(name, 16) + 7 * place) % VOCAB for place in range(9)] for name in adapters}
    played = harness.play([harness.log(name, prompt, name, max_tokens=8) for name, prompt in prompts.items()])
    truths = {
        name: hf_greedy(PeftModel.from_pretrained(hf_model(base), folder).eval(), prompts[name], 8)
        for name, folder in adapters.items()
    }
    assert {name: played[name].tokens for name in adapters} == truths
    plain = hf_model(base)
    assert sum(hf_greedy(plain, prompts[name], 8) != truth for name, truth in truths.items()) >= 14


def each_expert(base: Path, path: Path, *, block: str, names: tuple[str, ...], experts: int) -> Path:
    """An adapter with a pair for each expert's module, as transformers 4 had them."""
    folder = make_adapter_folder(path, base, rank=3, targets=["q_proj"], scale=0.4)
    config = json.loads((folder / CONFIG_FILE).read_text())
    config["target_modules"] = ["q_proj", *names]
    config["alpha_pattern"] = {names[0]: 12}
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    generator, tensors = torch.Generator().manual_seed(5), load_file(folder / TENSORS_FILE)
    shapes = lora_shapes(load_model(base, device=CPU))
    sites = [site for site in shapes.sites.values() if site.experts > 1]
    for layer in range(shapes.layers):
        for expert in range(experts):
            for site in sites:
                module = f"{block}.experts.{expert}.{site.path.rpartition('.')[2]}"
                own = f"base_model.model.model.layers.{layer}.{module}"
                tensors[f"{own}.lora_A.weight"] = torch.randn(3, site.inputs, generator=generator) * 0.2
                tensors[f"{own}.lora_B.weight"] = torch.randn(site.outputs, 3, generator=generator) * 0.2
    save_file(tensors, folder / TENSORS_FILE)
    return folder


@pytest.mark.parametrize(
    ("family", "block", "names", "experts"),
    [
        ("qwen3_moe", "mlp", ("gate_proj", "up_proj", "down_proj"), 6),
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2"), 4),
    ],
)
def test_one_pair_for_each_experts_module_gives_what_peft_gives(
    family: str, block: str, names: tuple[str, ...], experts: int, tmp_path: Path
) -> None:
    base = model_folder(family)
    folder = each_expert(base, tmp_path / "a", block=block, names=names, experts=experts)
    harness = EngineHarness(base, {"a": folder})
    prompt = [*range(40, 60)]
    played = harness.play([harness.log("a", prompt, "a", max_tokens=12), harness.log("b", prompt)])
    # PEFT's own reading of alpha_pattern for such files differs by expert's parameter, so merge by hand.
    model, tensors = hf_model(base), load_file(folder / TENSORS_FILE)
    with torch.no_grad():
        for layer, module in enumerate(model.model.layers):
            prefix = f"base_model.model.model.layers.{layer}."
            q = [tensors[f"{prefix}self_attn.q_proj.lora_{half}.weight"] for half in "BA"]
            module.self_attn.q_proj.weight += 2.0 * q[0] @ q[1]
            for expert in range(experts):
                change = [
                    (4.0 if name == names[0] else 2.0)
                    * tensors[f"{prefix}{block}.experts.{expert}.{name}.lora_B.weight"]
                    @ tensors[f"{prefix}{block}.experts.{expert}.{name}.lora_A.weight"]
                    for name in names
                ]
                module.mlp.experts.gate_up_proj[expert] += torch.cat(change[:2])
                module.mlp.experts.down_proj[expert] += change[2]
    assert played["a"].tokens == hf_greedy(model, prompt, 12)
    assert played["a"].tokens != played["b"].tokens[:12]


def test_the_swapped_layout_of_older_versions_of_peft_is_read(tmp_path: Path) -> None:
    base = model_folder("qwen3_moe")
    folder = make_adapter_folder(tmp_path / "new", base, rank=3, targets=[], target_parameters=BOTH)
    old = tmp_path / "old"
    old.mkdir()
    config = json.loads((folder / CONFIG_FILE).read_text()) | {"peft_version": "0.18.1"}
    (old / CONFIG_FILE).write_text(json.dumps(config))
    tensors, swapped = load_file(folder / TENSORS_FILE), {}
    for name, a in tensors.items():
        if ".lora_A." in name:  # dW = B[:, e::E] A[e r:] as (A'[e r:]^T B'[:, e::E]^T)
            b_name = name.replace(".lora_A.", ".lora_B.")
            b = tensors[b_name]
            experts, rank = 6, 3
            swapped[name] = (
                b.view(len(b), rank, experts).permute(2, 1, 0).reshape(experts * rank, -1).contiguous()
            )
            swapped[b_name] = (
                a.view(experts, rank, -1).permute(2, 1, 0).reshape(a.shape[1], experts * rank).contiguous()
            )
    save_file(swapped, old / TENSORS_FILE)
    shapes = lora_shapes(load_model(base, device=CPU))
    new_one, old_one = read_adapter(folder, shapes), read_adapter(old, shapes)
    assert new_one.digest == old_one.digest
    assert new_one.rank == 8
    assert {module for _, module in new_one.pairs} == {"expert_gate", "expert_up", "expert_down"}


def test_a_mix_of_adapters_on_experts_is_their_sum(tmp_path: Path) -> None:
    base = model_folder("qwen3_moe")
    options: dict[str, dict[str, Any]] = {
        "one": {"rank": 3, "targets": ["q_proj"], "target_parameters": BOTH},
        "two": {"rank": 10, "targets": ["o_proj"], "target_parameters": BOTH[1:]},
    }
    folders = {
        name: make_adapter_folder(tmp_path / name, base, scale=0.5, seed=each["rank"], **each)
        for name, each in options.items()
    }
    harness, model = EngineHarness(base), hf_model(base)
    for folder in folders.values():
        model = PeftModel.from_pretrained(model, folder).merge_and_unload()
    read = [(read_adapter(folder, harness.shapes), 1.0) for folder in folders.values()]
    # One part changes the experts of some layers only: all layers have the same pages.
    one = read[0][0]
    fewer = {site: pair for site, pair in one.pairs.items() if site != (1, "expert_down")}
    assert mixed("x", [(replace(one, pairs=fewer), 1.0), read[1]]).ranks["expert_down"] == 6 * 24
    harness.place("mix", mixed("mix", read))
    prompt = [*range(40, 60)]
    played = harness.play([harness.log("a", prompt, "mix", max_tokens=12)])
    assert played["a"].tokens == hf_greedy(model, prompt, 12)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_dora": True}, "DoRA and biases are not supported on experts"),
        ({"target_parameters": ["experts.down_proj"]}, "does not name gate_up_proj"),
        ({"target_parameters": "gate_up_proj"}, "must be a list of names"),
        ({"r": 5}, "shape"),
        ({"peft_version": "0.17.0"}, "shape"),
    ],
)
def test_a_config_that_does_not_fit_the_experts_tensors_is_refused(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    base = model_folder("qwen3_moe")
    folder = make_adapter_folder(tmp_path / "a", base, rank=3, targets=[], target_parameters=BOTH)
    config = json.loads((folder / CONFIG_FILE).read_text()) | change
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(AdapterError, match=why):
        read_adapter(folder, lora_shapes(load_model(base, device=CPU)))


def test_half_a_pair_of_experts_is_refused_by_name(tmp_path: Path) -> None:
    base = model_folder("qwen3_moe")
    folder = make_adapter_folder(tmp_path / "a", base, rank=3, targets=[], target_parameters=BOTH)
    tensors = load_file(folder / TENSORS_FILE)
    name = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    del tensors[name]
    save_file(tensors, folder / TENSORS_FILE)
    with pytest.raises(AdapterError, match="its lora_B is missing") as refused:
        read_adapter(folder, lora_shapes(load_model(base, device=CPU)))
    assert refused.value.param == name.replace("lora_B", "lora_A")


def test_experts_that_need_more_than_the_memory_for_adapters_are_refused(tmp_path: Path) -> None:
    base = model_folder("qwen3_moe")
    folder = make_adapter_folder(tmp_path / "a", base, rank=64, targets=[], target_parameters=BOTH)
    harness = EngineHarness(base)
    pool = harness.ranks[0].adapters
    adapter = read_adapter(folder, harness.shapes)
    pool.bounds = type(pool.bounds)(pool.bounds.shapes, 512, 1e38, max_extra=1000)
    with pytest.raises(AdapterError, match="--adapter-memory"):
        pool.check_fits(adapter)
