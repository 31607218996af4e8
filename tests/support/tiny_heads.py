"""Folders of EAGLE-3 heads for tiny models, and the same head in plain torch.

`make_head_folder(path, base)` writes a head with random weights for the model in `base`.
`make_knowing_head(path, base)` writes one whose guesses are all right for a model of `bigram_model`, whose
next token depends on the newest one only. `Reference(folder, base)` computes a head from the paper's
equations, one sequence at a time, over hidden states of transformers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

EPS = 1e-5
Tensors = dict[str, Tensor]


def config_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def write_head(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(plain, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_head_folder(path: Path, base: Path, *, seed: int = 0, size: int = 300, **overrides: Any) -> Path:
    """A head with random weights. It guesses `size` of the tokens. `overrides` are fields of config.json."""
    served = config_of(base)
    hidden, vocab, heads, dim = served["hidden_size"], served["vocab_size"], 4, 16
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": 80,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": dim,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "draft_vocab_size": size,
        "max_position_embeddings": 1024,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        **overrides,
    }
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw) * shape[-1] ** -0.5

    def norm() -> Tensor:
        return 1 + 0.3 * torch.randn(hidden, generator=draw)

    reads = len(config["eagle_aux_hidden_state_layer_ids"] or (0, 0, 0))
    attention, mlp = "midlayer.self_attn", "midlayer.mlp"
    ids = torch.randperm(vocab, generator=draw)[:size].sort()[0]
    there = torch.zeros(vocab, dtype=torch.bool)
    there[ids] = True
    tensors = {
        "fc.weight": matrix(hidden, reads * hidden),
        "midlayer.input_layernorm.weight": norm(),
        "midlayer.hidden_norm.weight": norm(),
        "midlayer.post_attention_layernorm.weight": norm(),
        f"{attention}.q_proj.weight": matrix(heads * dim, 2 * hidden),
        f"{attention}.k_proj.weight": matrix(2 * dim, 2 * hidden),
        f"{attention}.v_proj.weight": matrix(2 * dim, 2 * hidden),
        f"{attention}.o_proj.weight": matrix(hidden, heads * dim),
        f"{mlp}.gate_proj.weight": matrix(80, hidden),
        f"{mlp}.up_proj.weight": matrix(80, hidden),
        f"{mlp}.down_proj.weight": matrix(hidden, 80),
        "norm.weight": norm(),
        "lm_head.weight": matrix(size, hidden),
        "d2t": ids - torch.arange(size),
        "t2d": there,
    }
    return write_head(path, config, tensors)


def bigram_model(path: Path, base: Path) -> Path:
    """The model in `base` with layers that add nothing: its next token depends on the newest one only."""
    shutil.copytree(base, path, dirs_exist_ok=True)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_knowing_head(path: Path, base: Path, **overrides: Any) -> Path:
    """A head for a `bigram_model`. Each place attends to itself alone, and what it adds takes the hidden
    state out of the residual stream, so that only the newest token counts. The output matrix is the model's,
    with its tokens in another order."""
    make_head_folder(path, base, size=config_of(base)["vocab_size"], **overrides)
    config, tensors = config_of(path), load_file(path / "model.safetensors")
    served = load_file(base / "model.safetensors")
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": hidden}
    only_token = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    attention = "midlayer.self_attn"
    order = torch.randperm(vocab, generator=torch.Generator().manual_seed(1))
    tensors |= {
        "fc.weight": torch.zeros_like(tensors["fc.weight"]),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        f"{attention}.q_proj.weight": 100 * only_token,
        f"{attention}.k_proj.weight": only_token,
        f"{attention}.v_proj.weight": torch.cat((torch.eye(hidden), -torch.eye(hidden)), 1),
        f"{attention}.o_proj.weight": torch.eye(hidden),
        "midlayer.mlp.down_proj.weight": torch.zeros_like(tensors["midlayer.mlp.down_proj.weight"]),
        "norm.weight": served["model.norm.weight"].float(),
        "lm_head.weight": served.get("lm_head.weight", served["model.embed_tokens.weight"])[order].float(),
        "d2t": order - torch.arange(vocab),
    }
    return write_head(path, config, tensors)


class Reference:
    """See the module."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.config = config_of(folder)
        self._weights = load_file(folder / "model.safetensors")
        self._model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        self.ids = torch.arange(len(self._weights["d2t"])) + self._weights["d2t"]

    @torch.inference_mode()
    def logits(self, tokens: list[int], guessed: list[int]) -> list[Tensor]:
        """The head's logits after `tokens`, then after each of the `guessed` tokens too."""
        leaving: list[Tensor] = []  # the last layer; transformers only tells what comes after the norm
        hook = self._model.model.norm.register_forward_pre_hook(lambda _, given: leaving.extend(given))
        found = self._model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        hook.remove()
        found = (*found[:-1], *leaving)
        layers = self.config["eagle_aux_hidden_state_layer_ids"]
        if layers is None:
            count = len(found) - 1
            layers = [2, count // 2, count - 3]
        hidden = torch.cat([found[layer][0] for layer in layers], -1) @ self._weights["fc.weight"].T
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        inputs = tokens[1:]
        for step in range(len(guessed) + 1):
            for place, token in enumerate(inputs):
                own = hidden[place]
                result = self._layer(token, own, len(keys), keys, values)
            logits.append(self._weights["lm_head.weight"] @ self._norm("norm", result))
            hidden, inputs = result[None], guessed[step : step + 1]
        return logits

    def _layer(
        self, token: int, hidden: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """One place of the sequence, after those whose keys and values there are."""
        config, weights = self.config, self._weights
        embedded = self._model.get_input_embeddings().weight[token]
        normed = self._norm("midlayer.hidden_norm", hidden)
        x = torch.cat((self._norm("midlayer.input_layernorm", embedded), normed))
        q, k, v = (
            (weights[f"midlayer.self_attn.{name}_proj.weight"] @ x).view(-1, config["head_dim"])
            for name in "qkv"
        )
        keys.append(self._turned(k, position))
        values.append(v)
        group = config["num_attention_heads"] // config["num_key_value_heads"]
        mixed = []
        for head, query in enumerate(self._turned(q, position)):
            scores = torch.stack([key[head // group] @ query for key in keys]) * config["head_dim"] ** -0.5
            own = torch.stack([value[head // group] for value in values])
            mixed.append(scores.softmax(0) @ own)
        residual = normed if config.get("norm_before_residual") else hidden
        total = residual + weights["midlayer.self_attn.o_proj.weight"] @ torch.cat(mixed)
        normed = self._norm("midlayer.post_attention_layernorm", total)
        gate, up = (weights[f"midlayer.mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
        return total + weights["midlayer.mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def _turned(self, x: Tensor, position: int) -> Tensor:
        half = x.shape[-1] // 2
        angle = position * self.config["rope_theta"] ** (-torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        return torch.cat(
            (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), 1
        )

    def _norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean() + self.config["rms_norm_eps"])
        return x * scale * self._weights[f"{name}.weight"]
