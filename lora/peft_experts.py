"""LoRA on the experts of a layer, as PEFT writes it.

There are two layouts. Adapters of transformers 4 have one pair for each expert's module:
`mlp.experts.3.gate_proj.lora_A`. PEFT's `target_parameters` has one pair for all experts of a parameter,
which is called `mlp.experts.lora_A`, or `mlp.experts.base_layer.lora_A` for gate_up_proj if down_proj has one
too. With E experts and rank r its A is [E r, inputs], expert by expert, and its B [outputs, E r] with the
expert last:

    dW_e = scaling * B[:, e::E] A[e r : (e + 1) r]

The rows of gate_up_proj's B are those of gate, then those of up; in gpt-oss they alternate. PEFT before 0.19
swapped the two sides for parameters that are [E, outputs, inputs], as all but gpt-oss' and Llama 4's are.
Since then PEFT does so for Llama 4's, because transformers does not mark them as [E, inputs, outputs].
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from personae.kernels.sgmv import RANK_PAGE
from personae.lora import peft_vocabulary
from personae.lora.adapter import LoraPair
from personae.lora.peft_config import PeftConfig
from personae.lora.peft_names import PREFIX, refusal
from personae.lora.safetensors_file import SafetensorsFile
from personae.lora.shapes import LoraShapes

_LAYER = (
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,5})"
    r"(?:\.(?:mlp|block_sparse_moe|feed_forward|mixer))?\.experts"
)
_EACH = re.compile(_LAYER + r"\.(0|[1-9][0-9]{0,4})\.([a-z0-9_]+)\.lora_([AB])\.weight")
_FUSED = re.compile(_LAYER + r"(\.base_layer)?\.lora_([AB])\.weight")
GATE_UP, UP, DOWN = "gate_up_proj", "up_proj", "down_proj"
KEYS = {GATE_UP: ("expert_gate", "expert_up"), UP: ("expert_up",), DOWN: ("expert_down",)}
"""The sites of each of PEFT's parameters."""


@dataclass(frozen=True, slots=True)
class ExpertChange:
    """The change of one expert's module: a [r, inputs], b [r, outputs], without the scaling."""

    a: Tensor
    b: Tensor
    scaling: float


Found = dict[tuple[int, str], dict[int, ExpertChange]]
"""By layer and site, then by expert."""


def find(names: Iterable[str], shapes: LoraShapes) -> list[str]:
    """The names of experts' tensors, if the base has experts that adapters can change."""
    if not any(site.experts > 1 for site in shapes.sites.values()):
        return []
    return [
        name
        for name in names
        if _EACH.fullmatch(peft_vocabulary.plain(name)) or _FUSED.fullmatch(peft_vocabulary.plain(name))
    ]


def read(
    file: SafetensorsFile, names: Iterable[str], config: PeftConfig, shapes: LoraShapes
) -> dict[tuple[int, str], LoraPair]:
    """The experts' pairs by layer and site. Each expert has the same number of ranks there, in whole pages;
    where it has fewer, the rest is zero.

    Raises AdapterError, with the tensor as `param`.
    """
    found: Found = {}
    names = sorted(names)
    if names and config.roles("linear") != ("A", "B"):
        raise refusal(names[0], "DoRA and biases are not supported on experts")
    fused: dict[tuple[int, bool], dict[str, str]] = {}
    each: dict[tuple[int, int, str], dict[str, str]] = {}
    for name in names:
        plain = peft_vocabulary.plain(name)
        if (match := _FUSED.fullmatch(plain)) is not None:
            fused.setdefault((int(match[1]), match[2] is not None), {})[match[3]] = name
        elif (match := _EACH.fullmatch(plain)) is not None:
            each.setdefault((int(match[1]), int(match[2]), match[3]), {})[match[4]] = name
    for (layer, inner), pair in fused.items():
        wide = GATE_UP if "expert_gate" in shapes.sites else UP
        parameter = _parameter(pair, inner, (layer, True) in fused, wide, config)
        for key, expert, change in _read_fused(file, pair, layer, parameter, config, shapes):
            found.setdefault((layer, key), {})[expert] = change
    for (layer, expert, module), pair in each.items():
        key, change = _read_each(file, pair, (layer, expert, module), config, shapes)
        changes = found.setdefault((layer, key), {})
        if expert in changes:
            raise refusal(_both(pair)[0], "the file has this change as a part of all experts' tensor, too")
        changes[expert] = change
    ranks: dict[str, int] = {}
    for (_, key), changes in found.items():
        ranks[key] = max(ranks.get(key, 0), *(len(change.a) for change in changes.values()))
    return {site: _stacked(changes, site[1], ranks[site[1]], shapes) for site, changes in found.items()}


def _both(pair: Mapping[str, str]) -> tuple[str, str]:
    """The names of A and B. Raises AdapterError if one is missing."""
    for half, other in ("AB", "BA"):
        if half not in pair:
            raise refusal(pair[other], f"its lora_{half} is missing")
    return pair["A"], pair["B"]


def _parameter(pair: Mapping[str, str], inner: bool, nested: bool, wide: str, config: PeftConfig) -> str:
    """The parameter that a pair of all experts changes: the config says it if there is only one. `wide`: the
    one that reads the experts' input."""
    if inner:
        return wide
    if nested:
        return DOWN
    targets = {name.rpartition(".")[2] for name in config.parameters} & {wide, DOWN}
    if len(targets) != 1:
        raise refusal(
            next(iter(pair.values())),
            f"the config's target_parameters must name either {wide} or {DOWN}, or the file must have both",
        )
    return targets.pop()


def _check_layer(name: str, layer: int, key: str, shapes: LoraShapes) -> None:
    if layer >= shapes.layers:
        raise refusal(name, f"the base has {shapes.layers} layers")
    if not shapes.has(layer, key):
        raise refusal(name, f"layer {layer} of the base has no experts")


def _read_fused(
    file: SafetensorsFile,
    pair: Mapping[str, str],
    layer: int,
    parameter: str,
    config: PeftConfig,
    shapes: LoraShapes,
) -> Iterator[tuple[str, int, ExpertChange]]:
    first, second = _both(pair)
    keys = KEYS[parameter]
    _check_layer(first, layer, keys[0], shapes)
    site = shapes.sites[keys[0]]
    path = f"model.layers.{layer}.{site.path.partition('.*')[0]}.{parameter}"
    if not any(path == name or path.endswith(f".{name}") for name in config.parameters):
        raise refusal(
            first, f"the config's target_parameters does not name {parameter}, so PEFT would not apply it"
        )
    rank, scaling, experts = config.rank(path), config.scaling(path), site.experts
    outputs = site.outputs * len(keys)
    swapped = not site.alternate and config.swapped_experts != site.reversed
    rows, columns = (outputs, site.inputs) if swapped else (site.inputs, outputs)
    file.check_shape(first, (experts * rank, rows))
    file.check_shape(second, (columns, experts * rank))
    a = file.read_finite(first).view(experts, rank, rows)
    b = file.read_finite(second).view(columns, rank, experts).permute(2, 1, 0)
    if swapped:
        a, b = b, a
    for index, key in enumerate(keys):
        if site.alternate:
            part = b[..., index :: len(keys)]
        else:
            part = b[..., index * site.outputs : (index + 1) * site.outputs]
        for expert in range(experts):
            yield key, expert, ExpertChange(a[expert], part[expert], scaling)


def _read_each(
    file: SafetensorsFile,
    pair: Mapping[str, str],
    place: tuple[int, int, str],
    config: PeftConfig,
    shapes: LoraShapes,
) -> tuple[str, ExpertChange]:
    layer, expert, module = place
    first, second = _both(pair)
    known = {site.path.rpartition(".")[2]: key for key, site in shapes.sites.items() if site.experts > 1}
    if module not in known:
        raise refusal(first, f"the base's experts have {', '.join(known)}")
    key = known[module]
    _check_layer(first, layer, key, shapes)
    site = shapes.sites[key]
    if expert >= site.experts:
        raise refusal(first, f"the base has {site.experts} experts")
    path = first[len(PREFIX) : first.index(".lora_A")]
    config.targets.check(first, path)
    rank = config.rank(path)
    file.check_shape(first, (rank, site.inputs))
    file.check_shape(second, (site.outputs, rank))
    return key, ExpertChange(file.read_finite(first), file.read_finite(second).T, config.scaling(path))


def _stacked(changes: Mapping[int, ExpertChange], key: str, rank: int, shapes: LoraShapes) -> LoraPair:
    """One pair for all experts, each with `rank` ranks in whole pages. Different scalings are folded into
    B."""
    site, ranks = shapes.sites[key], -(-rank // RANK_PAGE) * RANK_PAGE
    some = next(iter(changes.values()))
    same = all(change.scaling == some.scaling for change in changes.values())
    dtype = some.b.dtype if same else torch.float32
    a = torch.zeros(site.experts, ranks, site.inputs, dtype=some.a.dtype)
    b = torch.zeros(site.experts, ranks, site.outputs, dtype=dtype)
    for expert, change in changes.items():
        own = len(change.a)
        a[expert, :own] = change.a
        b[expert, :own] = change.b if same else change.b.float() * change.scaling
    scaling = some.scaling if same else 1.0
    return LoraPair(a.flatten(0, 1), b.flatten(0, 1), scaling, experts=site.experts)
