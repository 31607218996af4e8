"""Tiny random models of many families, made by transformers' own classes and saved by transformers.

`make_family_folder(path, "glm4_moe")` writes a model folder with all weights random, norms and biases
included.
"""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import VOCAB, write_json, write_tokenizer
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
)

from personae.engine.models import MODEL_TYPES

# transformers lists it only among the models that read images. It ignores the call without `exist_ok`.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "sliding_window": 40,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "shared_intermediate_size": 48,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
"""The sizes, by every name that some family has for them."""
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FULL = ["full_attention"] * 3
HALF = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "original_max_position_embeddings": 32}
LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": None}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 24, "mamba_proj_bias": True}
FALCON_H1 = {**MAMBA, "projectors_bias": True, "mamba_d_ssm": 96, "pad_token_id": None}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {}),
    "mixtral": ("mixtral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "phi3": ("phi3", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.7}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"layer_types": MIXED}),
    "olmoe": ("olmoe", {}),
    "gemma3": ("gemma3_text", {"layer_types": MIXED, "query_pre_attn_scalar": 24}),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}),
    "ministral": ("ministral", {"layer_types": MIXED}),
    "cwm": ("cwm", {"layer_types": MIXED, "rope_parameters": LLAMA3}),
    "internlm3": (
        "internlm3",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 50000.0},
        },
    ),
    "exaone4": ("exaone4", {"layer_types": MIXED}),
    "exaone4, no window": (
        "exaone4",
        {"sliding_window": None, "layer_types": FULL, "sliding_window_pattern": None},
    ),
    "gemma": ("gemma", {}),
    "hyperclovax": (
        "hyperclovax",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.5,
        },
    ),
    "granitemoe": (
        "granitemoe",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.5,
            "residual_multiplier": 0.7,
            "logits_scaling": 0.5,
        },
    ),
    "granitemoeshared": ("granitemoeshared", {"attention_multiplier": 0.3, "attention_bias": True}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * 3,
            "attention_multiplier": 0.3,
            "position_embedding_type": "rope",
        },
    ),
    "granitemoehybrid, dense": (
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "attention_multiplier": 0.3,
        },
    ),
    "granitemoehybrid, Mamba": (
        "granitemoehybrid",
        {
            **MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
        },
    ),
    "flex_olmo": ("flex_olmo", {}),
    "mellum": ("mellum", {"layer_types": MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "helium": ("helium", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, a dense layer": ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 2.5}),
    "dots1": ("dots1", {"layer_types": MIXED, "norm_topk_prob": True}),
    "solar_open": ("solar_open", {}),
    "exaone_moe": ("exaone_moe", {"layer_types": MIXED, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "minimax_m2": ("minimax_m2", {"rope_parameters": HALF}),
    "hy_v3": ("hy_v3", {"mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "gemma2": (
        "gemma2",
        {
            "layer_types": MIXED,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "vaultgemma": ("vaultgemma", {"layer_types": MIXED, "attn_logit_softcapping": 2.0}),
    "iquestcoder": ("iquestcoder", {}),
    "granite_swa": (
        "granite_swa",
        {"layer_types": MIXED, "layer_rope_theta": [1e4, 0, 1e5], "attention_multiplier": 0.3},
    ),
    "granitemoe_swa": ("granitemoe_swa", {"layer_types": MIXED, "residual_multiplier": 0.7}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"moe_topk": [2, 3, 2]}),
    "hunyuan_v1_dense": (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 10000.0, "factor": 1.0}},
    ),
    "ministral3": (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "gpt_oss": ("gpt_oss", {"layer_types": MIXED, "rope_parameters": {**YARN, "truncate": False}}),
    "cohere": ("cohere", {"attention_bias": True}),
    "cohere2": ("cohere2", {"layer_types": MIXED}),
    "cohere2_moe": (
        "cohere2_moe",
        {"layer_types": MIXED, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 1},
    ),
    "cohere2_moe, sigmoid and RMS norms": (
        "cohere2_moe",
        {
            "layer_types": MIXED,
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-5,
        },
    ),
    "starcoder2": ("starcoder2", {}),
    "phi": ("phi", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True}),
    "nemotron": ("nemotron", {"mlp_bias": True}),
    "arcee": ("arcee", {}),
    "jais2": ("jais2", {}),
    "deepseek_v2": (
        "deepseek_v2",
        {**LATENT, "topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    "deepseek_v2, as V2-Lite": ("deepseek_v2", {**LATENT, "q_lora_rank": None, "n_group": None}),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}, "attention_bias": True},
    ),
    "deepseek_v3, halves": ("deepseek_v3", {**LATENT, "rope_interleave": False, "q_lora_rank": None}),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "mistral4": (
        "mistral4",
        {
            **LATENT,
            "n_group": 1,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "block_multiple_of": 32,
            "pad_token_id": None,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "pad_token_id": None},
    ),
    "qwen3_next": ("qwen3_next", {**DELTA, "mlp_only_layers": [1]}),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", DELTA),
    "minicpm3": ("minicpm3", {**LATENT, "scale_emb": 3, "dim_model_base": 48}),
    "minicpm3, LongRoPE": (
        "minicpm3",
        {
            **LATENT,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.2, 1.5, 2.0],
                "long_factor": [1.0, 1.3, 2.0, 4.0],
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 80,
            "moe_layers": [0, 2, 3],
            "no_rope_layers": [1, 0, 1, 1],
            "layer_types": [f"{kind}_attention" for kind in ("chunked", "full", "full", "chunked")],
            "attention_chunk_size": 37,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "pad_token_id": None,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full") * 3],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 3.0,
            "global_head_dim": 24,
            "pad_token_id": None,
        },
    ),
    "gemma4, experts": (
        "gemma4_text",
        {
            "layer_types": [*MIXED[1:], "full_attention"],
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "pad_token_id": None,
        },
    ),
    "gemma4, keys as values": (
        "gemma4_text",
        {
            "layer_types": [*MIXED[1:], "full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 24,
            "hidden_size_per_layer_input": 0,
            "pad_token_id": None,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 6,
            "intermediate_size": [96, 96, 80, 96, 80, 96],
            "activation_sparsity_pattern": [0.9, 0.0, 0.8, 0.0, 0.0, 0.5],
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full") * 3],
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB - 16,
            "laurel_rank": 10,
            "altup_coef_clip": 0.3,
            "final_logit_softcapping": 3.0,
            "pad_token_id": None,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "ssm_state_size": 24,
            "n_groups": 2,
            "time_step_min": 1e-30,  # transformers limits steps by it in prompts, but not in answers
            "use_bias": True,
            "mlp_bias": True,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
            "sliding_window": None,
        },
    ),
    "bamba": ("bamba", {**MAMBA, "attn_layer_indices": [1], "attention_bias": True, "mlp_bias": True}),
    "falcon_h1": (
        "falcon_h1",
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mlp_multipliers": [0.6, 0.8],
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.8],
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
        },
    ),
    "falcon_h1, no norm": ("falcon_h1", {**FALCON_H1, "attention_bias": True, "mlp_bias": True}),
    "falcon_h1, norm before the gate": ("falcon_h1", {**FALCON_H1, "mamba_rms_norm": True}),
    "nemotron_h, latent experts": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "ssm_state_size": 24,
            "n_groups": 2,
            "time_step_min": 1e-30,  # as above
            "mlp_bias": True,
            "moe_latent_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
            "sliding_window": None,
        },
    ),
    # transformers zeroes the embedding of its padding token after loading it.
    "youtu": ("youtu", {**LATENT, "pad_token_id": None}),
}
OFFSET_NORMS = (
    *("gemma", "gemma2", "gemma3_text", "vaultgemma", "nemotron"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
"""The families whose stored norms lack 1."""


def make_family_folder(path: Path, case: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes the folder of one of `CASES`, in float32. Returns the path."""
    kind, changes = CASES[case]
    wanted = {**SIZES, **changes, **overrides}
    config_class = CONFIG_MAPPING[kind]
    known = (
        {field.name for field in dataclasses.fields(config_class)}
        if dataclasses.is_dataclass(config_class)
        else {*inspect.signature(config_class.__init__).parameters}
    )
    known |= {"global_head_dim", "num_global_key_value_heads"}  # of classes that take any name
    known -= {"head_dim"} if wanted["head_dim"] is None else set()  # it follows from other sizes
    config = config_class(**{name: value for name, value in wanted.items() if name in known})
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = model_class(config).eval()
    randomize(model, seed, offset=0.0 if kind in OFFSET_NORMS else 1.0)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    saved = json.loads((path / "config.json").read_text())
    if saved["architectures"] != [MODEL_TYPES[kind]]:  # transformers has Llama's class for the family
        write_json(path / "config.json", saved | {"architectures": [MODEL_TYPES[kind]]})
    write_tokenizer(path)
    return path


@torch.no_grad()
def randomize(model: Any, seed: int, *, offset: float) -> None:
    """Fills all parameters, and the routers' corrections. Activations stay near 1. `offset`: of norms."""
    generator = torch.Generator().manual_seed(seed)

    def noise(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = 1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(noise(parameter.shape) * scale)
        else:
            is_norm = "norm" in name and name.endswith("weight")
            parameter.copy_(noise(parameter.shape) * 0.2 + (offset if is_norm else 0.0))
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.copy_(noise(buffer.shape) * 0.2)
        elif "layer_scalar" in name:
            buffer.copy_(1 + noise(buffer.shape) * 0.2)
