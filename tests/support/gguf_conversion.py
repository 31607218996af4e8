"""GGUF files by llama.cpp's own converter, of tiny random models, and what it writes about them.

`gguf_metadata.json` has the metadata that the converter of llama-cpp-python 0.3.36's source (2026-10) wrote
for each of `CASES`; `python -m personae.evals.gguf_families --converter FOLDER --record` makes it anew.
"""

import json
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from family_models import YARN, make_family_folder
from gguf_files import apart, converted, of_mamba, write_tokenizer
from safetensors.torch import load_file

RECORDED = Path(__file__).with_name("gguf_metadata.json")
_WINDOWS = ["sliding_attention"] * 3 + ["full_attention"]
_CHUNKS = ["chunked_attention"] * 3 + ["full_attention"]
_PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
# What llama.cpp takes as given differs from the sizes of `family_models.CASES`.
CASES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "glm4": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "exaone4": {},
    "exaone4, no window": {},
    "exaone_moe": {},
    "dots1": {"layer_types": ["full_attention"] * 3},
    "minimax_m2": {},
    "hunyuan_v1_moe": {"moe_topk": [2, 2, 2], "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"rope_parameters": _PLAIN},
    "ministral3": {"sliding_window": None},
    "cohere": {},
    "cohere2": {"num_hidden_layers": 4, "layer_types": _WINDOWS},
    "starcoder2": {"sliding_window": None},
    "phi": {"intermediate_size": 256, "num_key_value_heads": 4},
    "stablelm": {},
    "stablelm, parallel": {},
    "nemotron": {},
    "youtu": {},
    "llama4": {
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "layer_types": _CHUNKS,
        "no_rope_layers": [1, 1, 1, 0],
        "moe_layers": [1, 3],
        "interleave_moe_layer_step": 2,
    },
    "gemma3n": {"vocab_size_per_layer_input": 512},
    "gemma4": {},
    "gemma4, experts": {},
    "gemma4, keys as values": {},
    "granitemoehybrid": {},
    "falcon_h1": {"mamba_proj_bias": False, "projectors_bias": False},
    "falcon_h1, no norm": {
        "mamba_proj_bias": False,
        "projectors_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "minicpm3": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "v_head_dim": 16},
    "minicpm3, LongRoPE": {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "v_head_dim": 16},
    "jais2": {},
    "mellum": {"mlp_layer_types": ["sparse"] * 3},
    "hy_v3": {},
    "granite_swa": {"layer_rope_theta": [1e4, 0, 1e4]},
    "granitemoe_swa": {},
    "bamba": {},
    "mistral4": {
        "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
    },
    "solar_open": {},
}
PERMUTED = ("arcee", "mistral3", "granite", "granitemoe", "granite_swa", "granitehybrid")
NAMES_OF = {"granite_swa": "llama", "mellum": "qwen3moe", "hy_v3": "llama"}
"""Architectures that the package does not know yet, and one with the same names."""
VECTORS = {  # what the package's table does not name
    "layer_scalar": "layer_output_scale.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.e_score_correction.bias": "exp_probs_b.bias",
    "mlp.moe_statics.e_score_correction.bias": "exp_probs_b.bias",
    "mlp.gate.e_score_correction.bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction.bias": "exp_probs_b.bias",
    "mlp.expert_bias.bias": "exp_probs_b",  # without an ending
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.router.gate.weight": "ffn_gate_inp.weight",
    "mlp.shared_mlp.gate_proj.weight": "ffn_gate_shexp.weight",
    "mlp.shared_mlp.up_proj.weight": "ffn_up_shexp.weight",
    "mlp.shared_mlp.down_proj.weight": "ffn_down_shexp.weight",
    "shared_mlp.input_linear.weight": "ffn_up_shexp.weight",
    "shared_mlp.output_linear.weight": "ffn_down_shexp.weight",
    "block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    "block_sparse_moe.experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps.weight",
}
WITHOUT_HALVES = ("gemma4", "granite_swa", "mistral4")  # gates and ups of experts stay one tensor
_CONVERT = """
import sys
from pathlib import Path

sys.path[:0] = [sys.argv[1] + "/gguf-py", sys.argv[1]]
import gguf
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
from conversion.base import TextModel
from conversion.llama import LlamaModel
from conversion.mistral3 import Mistral3Model

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
LlamaModel.set_vocab = lambda self: self._set_vocab_gpt2()
folder, file = map(Path, sys.argv[2:])
fields = ModelBase.load_hparams(folder, False)
if fields["model_type"] == "mistral4":
    found = Mistral3Model.Mistral4Model
else:
    found = get_model_class(get_model_architecture(fields, ModelType.TEXT))


class Converted(found):
    model_arch = found.model_arch

    def set_vocab(self):
        self._set_vocab_gpt2()


Converted(folder, gguf.LlamaFileType.ALL_F32, file, eager=True, model_name="tiny").write()
"""


def folder_of(case: str, path: Path) -> Path:
    """The case's folder, as transformers writes it."""
    return make_family_folder(path, case, **CASES[case])


def makers_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields that the makers' own files have and transformers does not write."""
    kind, layers = config["model_type"], config.get("num_hidden_layers", 0)
    if kind == "minimax_m2":
        share = (config.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
        return {"rotary_dim": int(config["head_dim"] * share)}
    if kind == "cohere2":
        return {"rotary_pct": 1.0}
    if kind == "hunyuan_v1_moe":
        return {
            "moe_intermediate_size": [config["intermediate_size"]] * layers,
            "num_shared_expert": [1] * layers,
        }
    if kind == "granite_swa":
        return {"no_rope_layers": [int(theta > 0) for theta in config["layer_rope_theta"]]}
    if kind == "solar_open":
        return {"partial_rotary_factor": 1.0}
    if kind == "falcon_h1":
        return {"head_dim": config["hidden_size"] // config["num_attention_heads"]}
    if kind == "bamba":
        return {"attn_rotary_emb": config["hidden_size"] // config["num_attention_heads"] // 2}
    if kind == "granitemoehybrid":
        names = {"full_attention": "attention"}
        return {"layer_types": [names.get(own, own) for own in config["layer_types"]]}
    return {}


def convert(converter: Path, folder: Path, file: Path) -> Path:
    """The file of the folder, by the converter in llama.cpp's folder `converter`. Changes the folder's
    config.json. Raises RuntimeError with the converter's last words."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | makers_fields(config)))
    command = [sys.executable, "-W", "ignore", "-c", _CONVERT, str(converter), str(folder), str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().rsplit("\n", 1)[-1])
    return file


def metadata_of(file: Path) -> dict[str, Any]:
    """What a file says about its model, without its tokenizer: {key: (type, value)}."""
    found: dict[str, Any] = {}
    for key, field in gguf.GGUFReader(file).fields.items():
        if not key.startswith(("GGUF.", "tokenizer.", "general.")) or key == "general.architecture":
            found[key] = [[kind.name for kind in field.types], _plain(field.contents())]
    return found


def _plain(value: Any) -> Any:
    """The value as JSON can have it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return str(value) if isinstance(value, float) and abs(value) == float("inf") else value


def add_recorded(writer: gguf.GGUFWriter, fields: dict[str, Any]) -> None:
    """Adds what `metadata_of` found."""
    for key, (types, value) in fields.items():
        if key == "general.architecture":
            continue
        if types[0] == "ARRAY":
            writer.add_array(key, [float(each) if isinstance(each, str) else each for each in value])
        else:
            writer.add_key_value(key, value, gguf.GGUFValueType[types[0]])


def write_recorded(
    path: Path,
    folder: Path,
    case: str,
    in_q8_0: Collection[str] = (),
    matrices: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """The folder's model as the converter writes it: its recorded metadata, and the package's names. The
    tensors of `in_q8_0` have that type; others have the type `matrices` where it has their values exactly,
    and else are float32."""
    fields = json.loads(RECORDED.read_text())[case]
    kind = fields["general.architecture"][1]
    known = NAMES_OF.get(kind, kind)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names, config = gguf.get_tensor_name_map(arch, 8), json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, kind)
    add_recorded(writer, fields)
    write_tokenizer(writer, folder)
    stored: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in _of_kind(stored, kind, config):
        stem, _, end = name.rpartition(".")
        part = stem.rpartition(".")[2]
        if kind in PERMUTED and part in heads:
            halves = tensor.view(heads[part], 2, -1, *tensor.shape[1:])
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        if kind == "nemotron" and end == "weight" and "norm" in part:
            tensor = tensor + 1
        whole = name if name.startswith(("blk.", "altup")) else names.get_name(name)
        own = whole or f"{names.get_name(stem)}.{end}"
        if not own.startswith("None") and not (kind == "cohere2" and end == "bias"):
            values, kind_of = tensor.float().contiguous().numpy(), gguf.GGMLQuantizationType.F32
            if own in in_q8_0:
                kind_of = gguf.GGMLQuantizationType.Q8_0
            elif whole_blocks(values, matrices) and np.array_equal(rounded(values, matrices), values):
                kind_of = matrices
            written = gguf.quantize(values, kind_of)
            writer.add_tensor(own, written, raw_dtype=kind_of)
    if kind == "gemma4":
        shares = np.array([1.0] * 3 + [1e30] * 9, np.float32)  # a quarter of 12 pairs
        writer.add_tensor("rope_freqs.weight", shares)
    rope = config.get("rope_parameters") or {}
    for length in ("long", "short") if rope.get("rope_type") == "longrope" else ():
        writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def whole_blocks(values: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> bool:
    """Whether the values are matrices whose rows are whole blocks. llama.cpp leaves others as they are."""
    return values.ndim > 1 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0


def rounded(values: np.ndarray[Any, Any], kind: gguf.GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """The values as the package's own quantizer stores them, if they are `whole_blocks`."""
    if not whole_blocks(values, kind):
        return values
    return gguf.dequantize(gguf.quantize(values, kind), kind)


def _of_kind(
    stored: dict[str, torch.Tensor], kind: str, config: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under names that the table knows, or under GGUF's."""
    if kind == "llama4":
        yield from _apart(stored)
        return
    if kind == "granite" or kind == "granitemoe":
        stored = dict(of_mamba(stored, {"num_local_experts": 8, "mamba_n_groups": 1}))
    if kind in ("granitehybrid", "falcon-h1"):
        stored = dict(of_mamba(stored, config))
        stored |= {name: tensor.squeeze(1) for name, tensor in stored.items() if "conv1d.weight" in name}
    if kind == "falcon-h1":
        stored = {name: tensor * _multipliers(name, tensor, config) for name, tensor in stored.items()}
    if kind == "mistral4":
        stored = dict(apart(stored, config))
    streams: dict[str, list[torch.Tensor]] = {}
    for name, tensor in stored.items() if kind in WITHOUT_HALVES else converted(stored):
        layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if name.startswith(("model.altup_projections", "model.altup_unembed_projections")):
            streams.setdefault(name.split(".")[1], []).append(tensor)
        elif layer is not None and layer[2] in VECTORS:
            yield f"blk.{layer[1]}.{VECTORS[layer[2]]}", tensor
        elif name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor
    for name, parts in streams.items():
        yield (
            {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}[name]
            + ".weight",
            torch.stack(parts),
        )


def _multipliers(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """What Falcon-H1's converter multiplies a weight by."""
    gate, down = config["mlp_multipliers"]
    into, key = config["attention_in_multiplier"], config["key_multiplier"]
    factors = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": into,
        "k_proj": into * key,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    part = name.removesuffix(".weight").rpartition(".")[2]
    if part != "in_proj":
        return torch.tensor(factors.get(part, 1.0))
    inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (inner, inner, groups, groups, config["mamba_n_heads"])
    scales = torch.repeat_interleave(torch.tensor(config["ssm_multipliers"]), torch.tensor(sizes))
    return scales[:, None] * config["ssm_in_multiplier"]


def _apart(stored: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Llama 4's experts, whose matrices are transposed and have gate and up in one."""
    for name, tensor in stored.items():
        if name.endswith(".experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.transpose(1, 2).chunk(2, 1), strict=True):
                yield f"{name.removesuffix('gate_up_proj')}{part}_proj.weight", half
        elif name.endswith(".experts.down_proj"):
            yield f"{name}.weight", tensor.transpose(1, 2)
        else:
            yield name, tensor
