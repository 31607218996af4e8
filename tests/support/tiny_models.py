"""Tiny model folders with random weights, laid out as Hugging Face does, without transformers.

`make_model_folder(path, "qwen3", tie_word_embeddings=True)` writes config.json, model.safetensors,
generation_config.json, and a byte-level tokenizer of 512 tokens with a ChatML template.
`model_folder("qwen3")` does it once per session and returns the path. The same arguments give the same bytes.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB = 512
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]  # ids 0 to 3
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "rms_norm_eps": 1e-5,
        "head_dim": 24,
        "sliding_window": 40,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "mimo": {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "rms_norm_eps": 1e-5,
        "head_dim": 24,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
        "sliding_window": 40,
        "max_window_layers": 1,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "head_dim": 32,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rms_norm_eps": 1e-6,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "rms_norm_eps": 1e-5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "rms_norm_eps": 1e-5,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "sliding_window": 40,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "rms_norm_eps": 1e-6,
        "pad_token_id": 0,
        "no_rope_layer_interval": 2,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "embedding_multiplier": 2.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.5,
    },
    "olmo2": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
        "rope_theta": 500000.0,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "rms_norm_eps": 1e-6,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 40,
        "sliding_window_pattern": 2,
    },
}
# The text from which the tokenizer learns its merges.
CORPUS = """The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs.
A request is its token log; everything else is cache. Who goes next? The one that was served least.
{"name": "Ada", "age": 36, "tags": ["math", "engines"], "active": true, "note": null, "score": 0.25}
def answer(question: str) -> str:\n    return "forty-two" if question else "what was the question?"
Grüße aus Köln, naïve café, señor; 你好，世界。 Привет, мир! 🙂🚀 1 + 1 = 2, 10 * 10 = 100.
"""


def make_model_folder(
    path: Path, family: str = "llama", *, seed: int = 0, shards: int = 1, **overrides: Any
) -> Path:
    """Write a model folder of the family. `overrides` are fields of config.json. Returns the path.

    `torch_dtype` is the dtype of the stored weights. Every weight is random, norms and biases included, and
    of a size that keeps activations near 1, so that logits are far apart.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **FAMILIES[family], **overrides}
    write_weights(path, random_weights(config, seed), shards)
    write_json(path / "config.json", config)
    write_json(
        path / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 3}
    )
    write_tokenizer(path)
    return path


def model_folder(family: str = "llama", *, seed: int = 0, shards: int = 1, **overrides: Any) -> Path:
    """Like `make_model_folder`, but made once per session for the same arguments. Do not write into it."""
    return _cached(family, seed, shards, json.dumps(overrides, sort_keys=True))


@cache
def _cached(family: str, seed: int, shards: int, overrides: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix="personae-tiny-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return make_model_folder(path, family, seed=seed, shards=shards, **json.loads(overrides))


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of the checkpoint's tensors, as the family's reference implementation has them."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    kind = config["model_type"]
    attention_bias = kind not in ("mistral", "qwen2", "mimo", "phi3") and config.get("attention_bias", False)
    mlp_bias = kind in ("llama", "smollm3", "granite") and config.get("mlp_bias", False)
    qkv_bias = kind in ("qwen2", "mimo") or attention_bias
    linears = {
        "self_attn.q_proj": (q, hidden, qkv_bias),
        "self_attn.k_proj": (kv, hidden, qkv_bias),
        "self_attn.v_proj": (kv, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, q, attention_bias),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    if kind == "phi3":
        linears = {
            "self_attn.qkv_proj": (q + 2 * kv, hidden, False),
            "self_attn.o_proj": (hidden, q, False),
            "mlp.gate_up_proj": (2 * inner, hidden, False),
            "mlp.down_proj": (hidden, inner, False),
        }
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        mixed = dict(expert_shapes(config, layer))
        for name, (outputs, inputs, bias) in linears.items():
            if mixed and name.startswith("mlp."):
                continue
            yield f"{prefix}.{name}.weight", (outputs, inputs)
            if bias:
                yield f"{prefix}.{name}.bias", (outputs,)
        for name, shape in mixed.items():
            yield f"{prefix}.{name}.weight", shape
        if kind not in ("olmo2", "olmo3"):
            yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        if kind == "gemma3_text":
            yield f"{prefix}.pre_feedforward_layernorm.weight", (hidden,)
            yield f"{prefix}.post_feedforward_layernorm.weight", (hidden,)
        if kind in ("olmo2", "olmo3"):
            yield f"{prefix}.post_feedforward_layernorm.weight", (hidden,)
        if kind.startswith("olmo"):
            yield f"{prefix}.self_attn.q_norm.weight", (q,)
            yield f"{prefix}.self_attn.k_norm.weight", (kv,)
        if kind in ("qwen3", "qwen3_moe", "gemma3_text"):
            yield f"{prefix}.self_attn.q_norm.weight", (dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (dim,)
    for layer in range(config.get("num_nextn_predict_layers", 0)):
        prefix = f"model.mtp_layers.{layer}"
        for name, (outputs, inputs, bias) in linears.items():
            yield f"{prefix}.{name}.weight", (outputs, inputs)
            if bias:
                yield f"{prefix}.{name}.bias", (outputs,)
        yield f"{prefix}.input_proj.weight", (hidden, 2 * hidden)
        for name in ("token", "hidden", "input", "post_attention", "final"):
            yield f"{prefix}.{name}_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def expert_shapes(config: dict[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """The modules of a layer's mixture of experts; none for a dense layer."""
    hidden, kind = config["hidden_size"], config["model_type"]
    count = config.get("num_local_experts") or config.get("num_experts")
    dense = layer in config.get("mlp_only_layers", []) or (layer + 1) % config.get("decoder_sparse_step", 1)
    if not count or dense:
        return
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    path = "block_sparse_moe" if kind == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    yield f"{path}.gate", (count, hidden)
    for expert in range(count):
        yield f"{path}.experts.{expert}.{gate}", (inner, hidden)
        yield f"{path}.experts.{expert}.{up}", (inner, hidden)
        yield f"{path}.experts.{expert}.{down}", (hidden, inner)


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Seeded random tensors for all of `tensor_shapes`."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["torch_dtype"])
    weights = {}
    for name, shape in tensor_shapes(config):
        noise = torch.randn(shape, generator=generator)
        if "norm" in name:
            value = 0.2 * noise + (config["model_type"] != "gemma3_text")
        elif name.endswith(".bias"):
            value = 0.3 * noise
        elif "embed_tokens" in name:
            value = noise
        else:
            value = noise * 1.5 / shape[1] ** 0.5
        weights[name] = value.to(dtype)
    return weights


def write_weights(path: Path, weights: dict[str, torch.Tensor], shards: int = 1) -> None:
    """Write one safetensors file, or several with an index."""
    if shards == 1:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return
    names, index = list(weights), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(weight.nbytes for weight in weights.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index})


def write_tokenizer(path: Path) -> None:
    """Write tokenizer.json (byte-level BPE, which can encode any text) and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[3],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHATML,
    }
    write_json(path / "tokenizer_config.json", settings)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
