"""Reads an adapter folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.

LoRA on any subset of q, k, v, o, gate, up and down, in any layers. Every tensor in the file is applied or the
adapter is refused, with the tensor's name. The order is config, names and shapes, data, so that what is wrong
costs little.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from personae.errors import AdapterError
from personae.lora.adapter import Adapter, LoraPair, LoraShapes, magnitude, make_adapter
from personae.lora.peft_config import PeftConfig, read_config
from personae.lora.safetensors_file import SafetensorsFile

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"

PROJECTIONS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
MODULES = {projection: module for module, projection in PROJECTIONS.items()}
TENSOR_NAME = re.compile(
    rf"base_model\.model\.model\.layers\.(0|[1-9][0-9]{{0,5}})\.({'|'.join(map(re.escape, MODULES))})"
    r"\.lora_([AB])(?:\.default)?\.weight"
)
REASONS = {
    "lora_magnitude_vector": "DoRA is not supported",
    "lora_embedding_": "LoRA on embeddings is not supported",
    ".bias": "trained biases are not supported",
    "modules_to_save": "modules trained in full are not supported",
    "token_adapter": "trained tokens are not supported",
    "trainable_tokens": "trained tokens are not supported",
    "lm_head": "the output layer cannot be changed by an adapter",
    "embed_tokens": "the embedding cannot be changed by an adapter",
}


def read_adapter(folder: Path, shapes: LoraShapes) -> Adapter:
    """The adapter in `folder`, named after the folder, if all of it can be applied to a base of these shapes.

    Raises AdapterError, with the field or tensor as `param`, for whatever cannot be served as it was meant.
    """
    config = read_config(folder / CONFIG_FILE)
    path = folder / TENSORS_FILE
    if not path.exists() and (folder / PICKLE_FILE).exists():
        raise AdapterError(
            f"{PICKLE_FILE}: reading a pickle can run code; save the adapter as {TENSORS_FILE} instead "
            "(safe_serialization=True)",
            param=PICKLE_FILE,
        )
    with SafetensorsFile(path) as file:
        plan = [_plan(site, names, file, config, shapes) for site, names in _sites(file.entries, shapes)]
        return make_adapter(folder.name, {item.site: _read(file, item) for item in plan})


@dataclass(frozen=True, slots=True)
class PairPlan:
    """Two tensors that belong together and fit the config and the base; their data is not read yet."""

    site: tuple[int, str]
    a: str
    b: str
    scaling: float


def _sites(names: Iterable[str], shapes: LoraShapes) -> list[tuple[tuple[int, str], dict[str, str]]]:
    """By (layer, module), the names of its halves A and B, in a fixed order; every name is placed."""
    sites: dict[tuple[int, str], dict[str, str]] = {}
    for name in names:
        match = TENSOR_NAME.fullmatch(name)
        if match is None:
            known = (reason for part, reason in REASONS.items() if part in name)
            raise _refusal(name, next(known, f"it is not a lora_A or lora_B of {', '.join(MODULES)}"))
        layer, module, half = int(match[1]), MODULES[match[2]], match[3]
        if layer >= shapes.layers:
            raise _refusal(name, f"the base has {shapes.layers} layers")
        if module not in shapes.modules:
            raise _refusal(name, f"the base has no {match[2]}")
        halves = sites.setdefault((layer, module), {})
        if half in halves:
            raise _refusal(name, f"it is the same tensor as {halves[half]!r}")
        halves[half] = name
    if not sites:
        raise AdapterError(f"{TENSORS_FILE}: there are no tensors in it")
    return sorted(sites.items())


def _plan(
    site: tuple[int, str],
    names: dict[str, str],
    file: SafetensorsFile,
    config: PeftConfig,
    shapes: LoraShapes,
) -> PairPlan:
    layer, module = site
    for half, other in ("AB", "BA"):
        if half not in names:
            raise _refusal(names[other], f"its lora_{half} is missing")
    path = f"model.layers.{layer}.{PROJECTIONS[module]}"
    rank = config.rank(path)
    inputs, outputs = shapes.modules[module]
    for half, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
        found = file.entries[names[half]].shape
        if found != shape:
            raise _refusal(
                names[half],
                f"its shape is {list(found)}; by the base and the config's rank it is {list(shape)}",
            )
    return PairPlan(site, names["A"], names["B"], config.scaling(path))


def _read(file: SafetensorsFile, plan: PairPlan) -> LoraPair:
    a, b = file.read(plan.a), file.read(plan.b)
    for name, tensor in ((plan.a, a), (plan.b, b)):
        if not math.isfinite(magnitude(tensor)):
            raise _refusal(name, "it has values that are not finite")
    return LoraPair(a, b.T.contiguous(), plan.scaling)


def _refusal(name: str, reason: str) -> AdapterError:
    return AdapterError(f"{TENSORS_FILE}: {name!r}: {reason}", param=name)
