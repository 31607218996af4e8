"""Model families, one small file each, imported when a checkpoint names their architecture.

A family file has one function, `translate(architecture, fields) -> ModelConfig`, which interprets the
family's `config.json`. All families share the arithmetic and the tensor names (`decoder.py`). To add a
family, write its file and add its architecture here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from personae.engine.config import ModelConfig
    from personae.engine.fields import Fields

    Translate = Callable[[str, Fields], ModelConfig]

FAMILIES = {
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MiMoForCausalLM": "mimo",
    "Mistral3ForConditionalGeneration": "mistral",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo",
    "OlmoeForCausalLM": "olmoe",
    "Olmo3ForCausalLM": "olmo",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "SmolLM3ForCausalLM": "smollm3",
}
MODEL_TYPES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mimo": "MiMoForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""The architecture of a config.json that only has a `model_type`."""


def family(architecture: str) -> Translate | None:
    """The `translate` function of the architecture's family; None if it is not supported."""
    name = FAMILIES.get(architecture)
    if name is None:
        return None
    translate: Translate = import_module(f"personae.engine.models.{name}").translate
    return translate
