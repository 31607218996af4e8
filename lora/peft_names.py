"""The files of an adapter folder, and PEFT's names for their tensors."""

from collections.abc import Collection

from personae.errors import AdapterError
from personae.lora.shapes import LoraShapes

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

ROLES = {
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_B.bias": "lora_bias",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "base_layer.bias": "bias",
    "bias": "bias",
}

PREFIX = "base_model.model."
"""The prefix of every name."""


def targets(modules: Collection[str], shapes: LoraShapes) -> list[str]:
    """The names of these modules in a PEFT config."""
    paths = dict.fromkeys(site.path for key, site in shapes.sites.items() if key in modules)
    return [path.rpartition(".")[2] for path in paths]


def tensor_name(layer: int, module: str, role: str, shapes: LoraShapes) -> str:
    """PEFT's name for a tensor of one of our modules."""
    suffix = next(suffix for suffix, known in ROLES.items() if known == role)
    return f"{PREFIX}model.layers.{layer}.{shapes.sites[module].path}.{suffix}"


def refusal(name: str, reason: str) -> AdapterError:
    """An error about a tensor."""
    return AdapterError(f"adapter_model.safetensors: {name!r}: {reason}", param=name)
