"""Checkpoints whose tensors have the names of transformers' modules, as GPTQModel writes them. In some
families transformers' own files have others, and a gate and an up in one matrix."""

import re
from collections.abc import Iterator, Mapping

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.rows import joined
from personae.engine.config import ModelConfig
from personae.engine.layers.block import LayerSpec
from personae.engine.layers.dense_and_experts import experts_of
from personae.engine.layers.mlp import GATED, MlpSpec
from personae.errors import ModelLoadError

_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def with_file_names(stored: Mapping[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """The tensors with the names of transformers' files, and with gate and up merged where these have them
    so. Raises ModelLoadError if a tensor is there under both names."""
    pairs = [tuple(_names(spec)) for spec in config.layer_specs]
    found: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        own = _file_name(name, pairs)
        if own in found:
            raise ModelLoadError(f"{name} and {found[own].name} are the same tensor")
        found[own] = tensor
    for layer, spec in enumerate(config.layer_specs):
        if isinstance(spec.mlp, MlpSpec) and spec.mlp.merged:
            _merge(found, f"model.layers.{layer}.{spec.mlp.path}", spec.mlp)
    return found


def _names(spec: LayerSpec) -> Iterator[tuple[str, str]]:
    """How the names of a layer's tensors begin in transformers' modules, and how in its files."""
    moe = experts_of(spec)
    if moe is None:
        return
    block = moe.module or moe.path
    if moe.router_module is not None:
        yield f"{block}.{moe.router_module}.", f"{moe.path}.{moe.router}."
    if moe.correction is not None:
        yield f"{block}.e_score_correction_bias", f"{moe.path}.{moe.correction}"
    if moe.shared is not None and moe.shared.module is not None:
        yield f"{moe.shared.module}.", f"{moe.shared.path}."
    if moe.module is not None:
        yield f"{moe.module}.", f"{moe.path}."


def _file_name(name: str, pairs: list[tuple[tuple[str, str], ...]]) -> str:
    """The name in transformers' files of a tensor that has either name. `pairs`: of each layer."""
    match = _OF_LAYER.match(name)
    if match is None or int(match[1]) >= len(pairs):
        return name
    part = name[match.end() :]
    for module, file in pairs[int(match[1])]:
        if part.startswith(file):
            break
        if part.startswith(module):
            return f"{match[0]}{file}{part.removeprefix(module)}"
    return name


def _merge(stored: dict[str, StoredTensor], prefix: str, mlp: MlpSpec) -> None:
    """Puts one matrix in the place of gate and up, if the file has these two."""
    names = [f"{prefix}.{part}.weight" for part in GATED[:2]]
    parts = [stored[name] for name in names if name in stored]
    if len(parts) == 2 and parts[0].shape == parts[1].shape and len(parts[0].shape) == 2:
        for name in names:
            del stored[name]
        stored[f"{prefix}.{mlp.modules[0][0]}.weight"] = joined(parts)
