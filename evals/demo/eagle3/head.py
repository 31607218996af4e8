"""An EAGLE-3 head in plain torch, for training.

With f a fusion of three of the model's hidden states and e the embedding of the token after it:

    h = W_fc f                                        the first time; later the layer's own last result
    a = h + attention([norm(e), norm(h)])             over the pairs so far
    r = a + mlp(norm(a))                              which is h of the next guess
    logits = W_head norm(r)                           over the head's own, smaller vocabulary

In training the head also takes its own results as input, as it does when it guesses several tokens: step k
of place i has the result of step k - 1, and sees the first keys up to i and the k keys that its own steps
made since.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes of a head. Names are those of config.json."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int

    def config(self, layers: tuple[int, ...]) -> dict[str, Any]:
        """The config.json."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
            "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16",
            "target_hidden_size": self.hidden_size, "eagle_aux_hidden_state_layer_ids": list(layers),
            **asdict(self),
        }  # fmt: skip


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, inputs = shape.head_dim, 2 * shape.hidden_size
        self.shape = shape
        self.q_proj = nn.Linear(inputs, shape.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(inputs, shape.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(inputs, shape.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * size, shape.hidden_size, bias=False)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [B, T, 2 H] -> queries, keys, values, each [B, heads, T, D]. Keys and values are repeated."""
        shape = self.shape
        q, k, v = (
            projection(x).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = shape.num_attention_heads // shape.num_key_value_heads
        q, k = rotated(q, positions, shape.rope_theta), rotated(k, positions, shape.rope_theta)
        return q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """The rotary embedding. x: [..., T, D], positions: [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].float(), x[..., half:].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class _Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        outer, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(outer, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return found


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            _Norm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3)
        )
        self.self_attn, self.mlp = _Attention(shape), _Mlp(shape)


class Head(nn.Module):
    """The names of its parameters are those of a checkpoint."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = _Layer(shape)
        self.norm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)

    def forward(self, embedded: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """The logits of each step: step k's are [B, T - k, draft vocabulary], from place i with k guesses.

        embedded: [B, T, H], of the token after each place. states: [B, T, 3 H]. Rows are padded behind.
        """
        layer, size = self.midlayer, self.shape.head_dim
        places = embedded.shape[1]
        hidden = self.fc(states)
        causal = torch.full((places, places), -torch.inf).triu(1)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(steps):
            count = places - step
            hidden = hidden[:, :count].float()
            x = torch.cat((layer.input_layernorm(embedded[:, step:]), layer.hidden_norm(hidden)), -1)
            q, k, v = layer.self_attn.project(x, torch.arange(step, places, dtype=torch.float32))
            keys.append(k)
            values.append(v)
            q = q * size**-0.5
            scores = [(q @ keys[0][:, :, :count].transpose(-1, -2)).float() + causal[:count, :count]]
            scores += [(q * own[:, :, :count]).sum(-1, keepdim=True) for own in keys[1:]]
            weights = torch.cat(scores, -1).softmax(-1)
            mixed = (weights[..., :count] @ values[0][:, :, :count].float()).float()
            for place, own in enumerate(values[1:]):
                mixed = mixed + weights[..., count + place, None] * own[:, :, :count]
            hidden = hidden + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            found.append(self.lm_head(self.norm(hidden)))
        return found
