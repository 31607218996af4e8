"""The frequencies against those of transformers, at the sizes of real models."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from personae.engine.fields import Fields
from personae.engine.layers.rotary import rotary_tables
from personae.engine.models.common import rope_config

ROPES: dict[str, dict[str, Any]] = {
    "Llama 2": {"rope_theta": 10000.0},
    "Llama 3.1": {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "linear": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 8.0},
    "Qwen2.5 with YaRN": {
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
    },
    "YaRN with every field": {
        "rope_theta": 150000.0,
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "truncate": False,
        "mscale": 0.9,
        "mscale_all_dim": 0.6,
    },
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_the_tables_are_those_of_transformers(name: str, head_dim: int) -> None:
    rope, positions = ROPES[name], 40000
    fields = Fields({"rope_parameters": rope, "max_position_embeddings": 131072}, "config.json")
    cos, sin = rotary_tables(rope_config(fields), head_dim, positions, torch.device("cpu"))
    reference = LlamaRotaryEmbedding(
        LlamaConfig(
            head_dim=head_dim,
            hidden_size=head_dim * 4,
            num_attention_heads=4,
            max_position_embeddings=131072,
            rope_parameters=dict(rope),
        )
    )
    index = torch.randint(positions, (500,), generator=torch.Generator().manual_seed(0))
    true_cos, true_sin = reference(torch.zeros(1), index.unsqueeze(0))
    # One unit in the last place of a frequency turns position 40,000 by 2.4e-3 radians.
    torch.testing.assert_close(cos[index], true_cos[0, :, : head_dim // 2], atol=5e-3, rtol=0)
    torch.testing.assert_close(sin[index], true_sin[0, :, : head_dim // 2], atol=5e-3, rtol=0)
    near = torch.arange(300)
    true_cos, true_sin = reference(torch.zeros(1), near.unsqueeze(0))
    torch.testing.assert_close(cos[near], true_cos[0, :, : head_dim // 2], atol=5e-5, rtol=0)
    torch.testing.assert_close(sin[near], true_sin[0, :, : head_dim // 2], atol=5e-5, rtol=0)
