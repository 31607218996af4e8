"""Small GGUF files, written by the package `gguf` from the folders of `tiny_models`.

Names come from the package's own table, so that ours is tested against it. This does to tensors what a
converter does: it permutes q and k, adds one to Gemma's norms, and stacks the experts of a layer.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from tiny_models import CHATML, SPECIALS
from tokenizers import Tokenizer

Array = np.ndarray[Any, np.dtype[Any]]
PERMUTED = ("llama", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe", "smollm3")
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    "lfm2_moe": "lfm2moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
DELTA_NETS = ("qwen3next", "qwen35", "qwen35moe")
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")
PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
PLAIN = ("ffn_gate_inp", "attn_sinks", "shortconv.conv", "ssm_conv1d", "norm", "bias")  # never quantized
# The positions of the float16 scales in a block of a type that the package cannot make.
SCALES = {
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    **dict.fromkeys((Type.IQ1_S, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S), (0,)),
    **dict.fromkeys((Type.IQ4_NL, Type.IQ4_XS), (0,)),
    **dict.fromkeys((Type.IQ1_M, Type.NVFP4), ()),  # their scales are no float16
}


def blocks(weight: Array, type: Type, seed: int = 0) -> Array:
    """The weight in this type. What the package cannot make is random, of the right size."""
    if type not in SCALES:
        return gguf.quants.quantize(weight, type)
    elements, size = gguf.GGML_QUANT_SIZES[type]
    random = np.random.default_rng(seed)
    made = random.integers(0, 256, (weight.size // elements, size), np.uint8)
    _set_scale(made, type, 1.0)
    _set_scale(made, type, float(weight.std() / gguf.quants.dequantize(made, type).std()))
    return made.reshape(weight.shape[0], -1)


def _set_scale(made: Array, type: Type, scale: float) -> None:
    half = np.float16(scale).reshape(1)
    for place in SCALES[type]:
        made[:, place : place + 2] = half.view(np.uint8)
    if type == Type.IQ1_M:  # four bits of the scale are in each of the last four words
        bits = int(half.view(np.uint16)[0])
        for word in range(4):
            high = made[:, 49 + 2 * word]
            made[:, 49 + 2 * word] = (high & 15) | (bits >> 4 * word & 15) << 4
    if type == Type.NVFP4:
        made[:, :4] = torch.tensor(scale).to(torch.float8_e4m3fn).view(torch.uint8).item()


def write_gguf(
    path: Path,
    folder: Path,
    type: Type = Type.F32,
    *,
    types: Callable[[str], Type] | None = None,
    change: Callable[[gguf.GGUFWriter], object] | None = None,
    truth: Path | None = None,
    split: int = 0,
    joined: bool = True,
    tensors: Callable[[dict[str, Array]], dict[str, Array]] | None = None,
) -> Path:
    """Write a folder's model as GGUF, with its matrices in `type`, or as `types` says by their names.

    `truth`: the folder for the same model with the weights that the file means. `change` adds metadata,
    `tensors` changes float32 tensors by GGUF's names. `split`: tensors per part. `joined`:
    kv_b_proj is one tensor, as in older files. Returns the path of the first file.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = ARCHITECTURES.get(config["model_type"], config["model_type"])
    if kind == "nemotron_h":
        config["num_hidden_layers"] = len(config["layers_block_type"])
        kind += "_moe" if "moe" in config["layers_block_type"] else ""
    options = {"split_max_tensors": split} if split else {}
    writer = gguf.GGUFWriter(path, kind, **options)
    stored = load_file(folder / "model.safetensors")
    if kind in DELTA_NETS:
        stored = dict(delta_nets(stored, config))
    if kind in ("granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe"):
        stored = dict(of_mamba(stored, config))
    stored = dict(converted(stored))
    if not joined:
        stored = dict(apart(stored, config))
    inner = stored.get("model.layers.0.feed_forward.w1.weight")
    if inner is not None:  # LFM2's config.json has another size
        config["intermediate_size"] = inner.shape[0]
    write_config(writer, config)
    write_tokenizer(writer, folder)
    if change is not None:
        change(writer)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind),
        config["num_hidden_layers"],
    )
    meant = {}
    for place, (name, tensor) in enumerate(stored.items()):
        stem, _, end = name.rpartition(".")
        own = f"{names.get_name(stem)}.{end}" if end not in ("A_log", "D") else str(names.get_name(name))
        weight = tensor.float().numpy()
        matrices = weight.ndim > 1 and not any(part in own for part in PLAIN)
        kept = (types(own) if types else type) if matrices else Type.F32
        weight = weight.squeeze(1) if own.endswith(("shortconv.conv.weight", "ssm_conv1d.weight")) else weight
        flat = weight.reshape(-1, weight.shape[-1]) if weight.ndim > 2 else weight
        raw = blocks(flat, kept, place)
        meant[name] = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kept))).reshape(tensor.shape)
        raw = raw.reshape(*weight.shape[:-1], -1) if weight.ndim > 2 else raw
        if kind in PERMUTED and any(f".{part}_proj." in name for part in "qk"):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            raw = raw.reshape(heads, 2, raw.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(raw.shape)
        of_offset = kind in ("gemma", "gemma2", "gemma3", *DELTA_NETS) and "linear_attn" not in name
        if of_offset and "norm" in name:
            raw = raw + 1
        if tensors is not None:
            for other, changed in tensors({own: raw}).items():
                writer.add_tensor(other, changed, raw_dtype=kept)
            continue
        writer.add_tensor(own, raw, raw_dtype=kept)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if truth is not None:
        truth.mkdir()
        for file in folder.glob("*.json"):
            (truth / file.name).write_bytes(file.read_bytes())
        save_file(meant, truth / "model.safetensors", metadata={"format": "pt"})
    return path if not split else next(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def converted(stored: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors with names that the package's table knows: one of all experts for each of gate, up and
    down, whatever the family has."""
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in stored.items():
        if (match := EXPERT.fullmatch(name)) is not None:
            block = re.sub("block_sparse_moe|feed_forward", "mlp", match[1])
            own = f"{block}.experts.{PARTS.get(match[3], match[3])}.weight"
            experts.setdefault(own, []).append(tensor)  # safetensors sorts names as texts: below 10 experts
        elif ".experts.gate_up_proj" in name or ".experts.down_proj" in name:  # gpt-oss
            prefix, end = name.split(".experts.")[0], "bias" if name.endswith("_bias") else "weight"
            whole = tensor if end == "bias" else tensor.transpose(1, 2)
            if "down_proj" in name:
                yield f"{prefix}.experts.down_proj.{end}", whole.contiguous()
            else:
                yield f"{prefix}.experts.gate_proj.{end}", whole[:, 0::2].contiguous()
                yield f"{prefix}.experts.up_proj.{end}", whole[:, 1::2].contiguous()
        elif name.endswith("block_sparse_moe.input_linear.weight"):  # Granite
            prefix, half = name.split(".block_sparse_moe.")[0], tensor.shape[1] // 2
            yield f"{prefix}.mlp.experts.gate_proj.weight", tensor[:, :half].contiguous()
            yield f"{prefix}.mlp.experts.up_proj.weight", tensor[:, half:].contiguous()
        elif name.endswith("block_sparse_moe.output_linear.weight"):
            yield f"{name.split('.block_sparse_moe.')[0]}.mlp.experts.down_proj.weight", tensor
        elif name.endswith(".sinks"):
            yield f"{name}.weight", tensor
        else:
            renamed = name.replace("e_score_correction_bias", "e_score_correction.bias")
            yield renamed.replace(".expert_bias", ".expert_bias.bias"), tensor
    for name, parts in experts.items():
        yield name, torch.stack(parts)


def delta_nets(
    stored: Mapping[str, torch.Tensor], config: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of Qwen3.5 and Qwen3-Next as their converter writes them, with a tensor for each expert."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    wide, value, share = config["linear_key_head_dim"], config["linear_value_head_dim"], heads // keys

    def tiled(tensor: torch.Tensor, size: int) -> torch.Tensor:
        if config["model_type"] == "qwen3_next":
            return tensor
        return tensor.view(keys, share, size, -1).transpose(0, 1).reshape(tensor.shape)

    for name, tensor in stored.items():
        prefix, part = name.rsplit(".", 1)[0], name.split("linear_attn.")[-1]
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            for expert, own in enumerate(tensor):
                if name.endswith("down_proj"):
                    yield f"{prefix}.{expert}.down_proj.weight", own
                else:
                    gate, up = own.chunk(2)
                    yield f"{prefix}.{expert}.gate_proj.weight", gate
                    yield f"{prefix}.{expert}.up_proj.weight", up
        elif part == "A_log":
            yield name, tiled(-tensor.exp(), 1)
        elif part == "dt_bias":
            yield f"{prefix}.dt_proj.bias", tiled(tensor, 1)
        elif part == "in_proj_qkvz.weight":
            of_head = tensor.view(keys, -1, tensor.shape[1])
            *qkv, gate = of_head.split([wide, wide, share * value, share * value], 1)
            block = prefix.rpartition(".")[0]
            yield f"{block}.in_proj_qkv.weight", torch.cat([part.flatten(0, 1) for part in qkv])
            yield f"{block}.in_proj_z.weight", gate.flatten(0, 1)
        elif part in ("in_proj_qkv.weight", "conv1d.weight"):
            plain, values = tensor.split([2 * keys * wide, heads * value])
            yield name, torch.cat((plain, tiled(values, value)))
        elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
            yield name, tiled(tensor, value if "_z" in part else 1)
        elif part == "out_proj.weight":
            yield name, tiled(tensor.T.contiguous(), value).T.contiguous()
        else:
            yield name, tensor


def of_mamba(
    stored: Mapping[str, torch.Tensor], config: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of Granite 4's H models and Nemotron-H as their converter writes them."""
    for name, tensor in stored.items():
        prefix, part = name.rsplit(".", 1)[0], re.split(r"\.(?:mamba|mixer)\.", name)[-1]
        if ".mixer.experts." in name:
            yield name.replace("backbone.", "model.").replace(".mixer.", ".mlp."), tensor
        elif part == "A_log":
            yield name, -tensor.exp()[:, None]
        elif part == "D":
            yield name, tensor[:, None]
        elif part == "dt_bias":
            yield f"{prefix}.dt_proj.bias", tensor
        elif part == "norm.weight":
            groups = config.get("mamba_n_groups") or config["n_groups"]
            yield name, tensor.view(groups, -1)
        elif name.endswith("shared_mlp.input_linear.weight"):
            block = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            layer = name.split(".shared_mlp.")[0]
            for own, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield f"{layer}.{block}.{own}.weight", half
        elif name.endswith("shared_mlp.output_linear.weight"):
            block = "mlp.shared_expert" if config["num_local_experts"] else "mlp"
            yield f"{name.split('.shared_mlp.')[0]}.{block}.down_proj.weight", tensor
        else:
            yield name, tensor


def apart(stored: Mapping[str, torch.Tensor], config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, with the keys and values of kv_b_proj apart, as newer converters write them."""
    for name, tensor in stored.items():
        if not name.endswith("kv_b_proj.weight"):
            yield name, tensor
            continue
        heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
        keys, values = tensor.view(heads, -1, tensor.shape[1]).split([plain, config["v_head_dim"]], 1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2).contiguous()
        yield name.replace("kv_b_proj", "v_b_proj"), values.contiguous()


def write_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The fields of config.json under GGUF's names, as the converter writes them."""
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    if "intermediate_size" in config and config["model_type"] != "nemotron_h":
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    hybrid, lfm2 = config["model_type"] == "granitemoehybrid", config["model_type"].startswith("lfm2")
    kinds = config["layer_types"] if lfm2 or hybrid else config.get("layers_block_type", [])
    own = [config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds]
    if config["model_type"] == "nemotron_h":
        size = config["moe_intermediate_size"] if "moe" in kinds else config["intermediate_size"]
        writer.add_feed_forward_length([size if kind in ("mlp", "moe") else 0 for kind in kinds])
        writer.add_ssm_conv_kernel(config["conv_kernel"])
        writer.add_ssm_state_size(config["ssm_state_size"])
        writer.add_ssm_group_count(config["n_groups"])
        writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
        writer.add_ssm_time_step_rank(config["mamba_num_heads"])
        writer.add_rope_scaling_finetuned(False)
    writer.add_head_count_kv(own or config["num_key_value_heads"])
    if hybrid:
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
        writer.add_ssm_time_step_rank(config["mamba_n_heads"])
        writer.add_rope_scaling_finetuned(False)
    if lfm2:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    eps = next(name for name in ("norm_eps", "layer_norm_epsilon", "rms_norm_eps") if name in config)
    writer.add_layer_norm_rms_eps(config[eps])
    if eps == "layer_norm_epsilon":
        writer.add_layer_norm_eps(config[eps])
    writer.add_rope_freq_base(config["rope_theta"])
    turned = int(head * config.get("partial_rotary_factor", 1.0))
    writer.add_rope_dimension_count(config.get("qk_rope_head_dim") or turned)
    writer.add_vocab_size(config["vocab_size"])
    if "kv_lora_rank" in config:
        writer.add_kv_lora_rank(config["kv_lora_rank"])
        if config["q_lora_rank"]:
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_key_length(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["v_head_dim"])
    elif "head_dim" in config:
        writer.add_key_length(head)
        writer.add_value_length(head)
    kind = config["model_type"]
    if kind in ("gemma2", "gemma3_text", "gpt_oss", "phi3", "olmo3") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        if kind != "qwen3_next":
            writer.add_rope_dimension_sections([turned // 2 - turned // 4, turned // 4, 0, 0])
        writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    write_experts(writer, config)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if "shared_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if kind in ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid"):
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    scaling = config.get("rope_scaling") or {}
    if (way := scaling.get("type") or scaling.get("rope_type")) in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(way))
        writer.add_rope_scaling_factor(scaling["factor"])
        if "original_max_position_embeddings" in scaling:
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "mscale_all_dim" in scaling:
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def write_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """What a converter writes of experts, if there are some."""
    counts = (config.get(name) for name in ("num_local_experts", "n_routed_experts", "num_experts"))
    count = next((count for count in counts if count), None)
    if count is None:
        return
    kind = config["model_type"]
    if kind == "nemotron_h" and "moe" not in config["layers_block_type"]:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind not in ("mixtral", "olmoe", "granitemoe", "granitemoeshared", "granitemoehybrid"):
        writer.add_expert_feed_forward_length(
            config["intermediate_size"] if kind == "gpt_oss" else config["moe_intermediate_size"]
        )
    if kind in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if kind == "lfm2_moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config["num_dense_layers"])
    if kind == "nemotron_h":
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        if config["moe_latent_size"]:
            writer.add_moe_latent_size(config["moe_latent_size"])
    if kind in ("deepseek_v3", "glm4_moe", "glm4_moe_lite"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "n_shared_experts" in config:
        writer.add_expert_shared_count(config["n_shared_experts"])
        kinds = config.get("mlp_layer_types") or []
        writer.add_leading_dense_block_count(config.get("first_k_dense_replace", kinds.count("dense")))
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        if config.get("n_group"):
            writer.add_expert_group_count(config["n_group"])
            writer.add_expert_group_used_count(config["topk_group"])


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """The folder's byte-level tokenizer, which splits as GPT-2's does."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token in SPECIALS else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id
    writer.add_bos_token_id(ids(SPECIALS[0]))
    writer.add_eos_token_id(ids(SPECIALS[2]))
    writer.add_pad_token_id(ids(SPECIALS[3]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
