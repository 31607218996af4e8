"""Folders of MTP layers for tiny models, and the same layer made of transformers' modules.

`make_mtp_folder(path, base)` writes a layer with random weights for the model in `base`, in MiMo's format and
without a model. `make_knowing_mtp(path, base)` writes one whose guesses are all right for a model of
`tiny_heads.bigram_model`. `MtpReference(folder, base)` computes a layer one sequence at a time, and the whole
sequence anew for each guess.
"""

from pathlib import Path
from typing import Any

import torch
from hf import hf_model
from safetensors.torch import load_file
from tiny_heads import config_of, write_head
from tiny_models import FAMILIES, random_weights
from torch import Tensor, nn
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

LAYER = "model.mtp_layers.0."


def make_mtp_folder(path: Path, base: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A layer with random weights. `overrides` are fields of config.json."""
    served = config_of(base)
    config = {
        **FAMILIES["mimo"],
        "hidden_size": served["hidden_size"],
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "vocab_size": served["vocab_size"],
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **overrides,
    }
    weights = random_weights(config, seed)
    return write_head(path, config, {name: each for name, each in weights.items() if name.startswith(LAYER)})


def make_knowing_mtp(path: Path, base: Path) -> Path:
    """A layer for a `bigram_model`: it adds nothing, and what goes through it is the embedding of the newest
    token. Its last norm is the model's."""
    make_mtp_folder(path, base)
    config, tensors = config_of(path), load_file(path / "model.safetensors")
    hidden = config["hidden_size"]
    tensors |= {
        f"{LAYER}token_layernorm.weight": torch.ones(hidden),
        f"{LAYER}input_proj.weight": torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), 1),
        f"{LAYER}final_layernorm.weight": load_file(base / "model.safetensors")["model.norm.weight"].float(),
    }
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"{LAYER}{name}.weight"].zero_()
    return write_head(path, config, tensors)


class MtpReference:
    """See the module."""

    def __init__(self, folder: Path, base: Path) -> None:
        fields = config_of(folder)
        config = Qwen2Config(**{name: value for name, value in fields.items() if name != "model_type"})
        config._attn_implementation = "eager"
        weights = {
            name.removeprefix(LAYER): tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self._model = hf_model(base)
        self._rope, self._layer = Qwen2RotaryEmbedding(config), Qwen2DecoderLayer(config, 0).eval()
        own = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        self._norms = {name: Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps) for name in own}
        for name, norm in self._norms.items():
            norm.weight = nn.Parameter(weights.pop(f"{name}.weight"))
        self._input = weights.pop("input_proj.weight")
        self._layer.load_state_dict(weights)  # strict: these are all its tensors, and no others are left
        self.ids = torch.arange(fields["vocab_size"])

    @torch.inference_mode()
    def logits(self, tokens: list[int], guessed: list[int]) -> list[Tensor]:
        """The layer's logits after `tokens`, then after each of the `guessed` tokens too."""
        hidden = self._model.model(torch.tensor([tokens[:-1]])).last_hidden_state
        logits = []
        for step in range(len(guessed) + 1):
            after = self._pass(hidden, [*tokens[1:], *guessed[:step]])[:, -1:]
            logits.append(self._model.lm_head(after)[0, 0])
            hidden = torch.cat((hidden, after), 1)
        return logits

    def _pass(self, hidden: Tensor, tokens: list[int]) -> Tensor:
        embedded = self._model.get_input_embeddings()(torch.tensor([tokens]))
        pairs = (self._norms["hidden_layernorm"](hidden), self._norms["token_layernorm"](embedded))
        x = torch.cat(pairs, -1) @ self._input.T
        count = len(tokens)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        turns = self._rope(x, torch.arange(count)[None])
        return self._norms["final_layernorm"](self._layer(x, attention_mask=mask, position_embeddings=turns))
