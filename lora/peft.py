"""Reads an adapter folder as PEFT writes it: `adapter_config.json` and `adapter_model.safetensors`.

It supports LoRA on any subset of the base's `LoraSite`s, in any layers, with DoRA's magnitudes and biases.
`peft_vocabulary.py` reads changes of the embedding and the output matrix. If the base has several sites as
one module, such as Phi-3's qkv_proj, its B is cut by outputs, and each part gets the whole A. Every tensor in
the file is applied, or the adapter is rejected with the tensor's name. The config is read first, then names
and shapes, then data, so that an error costs little.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from personae.errors import AdapterError
from personae.lora import peft_experts, peft_vocabulary
from personae.lora.adapter import Adapter, LoraPair, make_adapter
from personae.lora.dora import DoraBias
from personae.lora.peft_config import PeftConfig, read_config
from personae.lora.peft_names import CONFIG_FILE, PICKLE_FILE, PREFIX, ROLES, TENSORS_FILE, refusal
from personae.lora.safetensors_file import SafetensorsFile
from personae.lora.shapes import LoraShapes
from personae.lora.single import transposed
from personae.lora.sites import MERGED, PROJECTIONS
from personae.lora.throttle import Rest, no_rest

TENSOR_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(0|[1-9][0-9]{0,5})\."
    r"((?:self_attn|mlp|block_sparse_moe|shared_mlp|feed_forward|conv|linear_attn|mamba|mixer|router"
    r"|laurel|altup)\.[a-z0-9_.]+?"
    r"|per_layer_input_gate|per_layer_projection)"
    rf"\.({'|'.join(map(re.escape, ROLES))})"
)
REASONS = {
    ".bias": "a bias of that module is not supported",
    "modules_to_save": "of modules trained in full only embed_tokens.weight and lm_head.weight are supported",
    "token_adapter": "trained tokens of that module are not supported",
    "lm_head": "the output layer cannot be changed in that way",
    "embed_tokens": "the embedding cannot be changed in that way",
}

EXPERTS = re.compile(r"(?:^|\.)(?:experts|gate|router|shared_expert|shared_expert_gate)(?:\.|$)")
KNOWN_PATHS = frozenset({*PROJECTIONS.values(), *MERGED.values()})

Site = tuple[int, str]  # layer, module


def read_adapter(folder: Path, shapes: LoraShapes, rest: Rest = no_rest) -> Adapter:
    """The adapter in `folder`, named after the folder, if all of it can be applied to a base of these shapes.
    `rest` is called regularly.

    Raises AdapterError, with the field or tensor as `param`, for anything that cannot be computed as
    intended.
    """
    if shapes.refusal is not None:
        raise AdapterError(shapes.refusal)
    config = read_config(folder / CONFIG_FILE)
    path = folder / TENSORS_FILE
    if not path.exists() and (folder / PICKLE_FILE).exists():
        raise AdapterError(
            f"{PICKLE_FILE}: reading a pickle can run code; save the adapter as {TENSORS_FILE} instead "
            "(safe_serialization=True)",
            param=PICKLE_FILE,
        )
    with SafetensorsFile(path, rest) as file, _with_base_name(config):
        vocabulary = peft_vocabulary.find(file.entries)
        experts = peft_experts.find(file.entries, shapes)
        others = {*experts, *(name for roles in vocabulary.values() for name in roles.values())}
        places = _places((name for name in file.entries if name not in others), shapes)
        if not places and not vocabulary and not experts:
            raise AdapterError(f"{TENSORS_FILE}: the file has no tensors", param=TENSORS_FILE)
        plans = [_plan(place, names, file, config, shapes) for place, names in places]
        tokens = shapes.vocabulary[0] if shapes.vocabulary else None
        if tokens is not None and (missing := max(config.invocation, default=0)) >= tokens:
            raise AdapterError(
                f"{CONFIG_FILE}: alora_invocation_tokens has {missing}; the base's tokens are from 0 to "
                f"{tokens - 1}, so nothing activates the adapter",
                param="alora_invocation_tokens",
            )
        if config.invocation and (late := [p for p in plans if shapes.sites[p.sites[0][1]].reads_cache]):
            raise refusal(
                next(iter(late[0].names.values())),
                "an adapter that begins at an invocation cannot change what is computed from the keys and "
                "values of earlier tokens",
            )
        read = {site: change for plan in plans for site, change in _read(file, plan, shapes)}
        return make_adapter(
            folder.name,
            {site: pair for site, (pair, _) in read.items() if pair is not None}
            | peft_experts.read(file, experts, config, shapes),
            dora_bias={site: dora_bias for site, (_, dora_bias) in read.items() if dora_bias is not None},
            vocabulary=peft_vocabulary.read(file, vocabulary, config, shapes),
            invocation=config.invocation,
            rest=rest,
        )


@contextmanager
def _with_base_name(config: PeftConfig) -> Iterator[None]:
    """Adds the name of the base that the adapter was made for to errors, because usually it is another
    one."""
    try:
        yield
    except AdapterError as error:
        made = f" (the adapter was made for {config.base!r})" if config.base else ""
        raise AdapterError(error.message + made, param=error.param) from error


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """The tensors of one PEFT module. They fit the config and the base, and their data is not read yet.
    sites: those whose outputs the module has."""

    sites: tuple[Site, ...]
    names: Mapping[str, str]
    scaling: float


def _places(names: Iterable[str], shapes: LoraShapes) -> list[tuple[tuple[int, str], dict[str, str]]]:
    """By (layer, PEFT's module), the names of its tensors by role, in a fixed order. Every name is placed."""
    paths = shapes.paths
    places: dict[tuple[int, str], dict[str, str]] = {}
    for name in names:
        match = TENSOR_NAME.fullmatch(peft_vocabulary.plain(name))
        if match is None or not (match[2] in paths or match[2] in KNOWN_PATHS or EXPERTS.search(match[2])):
            raise refusal(name, _why_not(name, paths))
        layer, module, role = int(match[1]), _alias(match[2], paths), ROLES[match[3]]
        if layer >= shapes.layers:
            raise refusal(name, f"the base has {shapes.layers} layers")
        if module not in paths:
            raise refusal(name, _no_site(module, paths))
        if not shapes.parts(layer, module):
            raise refusal(name, f"layer {layer} of the base has no {module} that adapters can change")
        roles = places.setdefault((layer, module), {})
        if role in roles:
            raise refusal(name, f"it is the same tensor as {roles[role]!r}")
        roles[role] = name
    return sorted(places.items())


def _alias(module: str, paths: Collection[str]) -> str:
    """The path of a module of a mixture of experts: older versions of transformers have another name for the
    block in some families."""
    other = module.replace("block_sparse_moe.", "mlp.", 1)
    return other if module not in paths and other in paths else module


def _no_site(module: str, paths: Collection[str]) -> str:
    """Why adapters cannot change the module of that path."""
    if EXPERTS.search(module):
        return f"the base has no such experts or router that adapters can change, only {', '.join(paths)}"
    return f"the base has no {module} that adapters can change"


def _why_not(name: str, modules: Iterable[str]) -> str:
    """Why a tensor of that name does not fit any of these modules."""
    if TENSOR_NAME.fullmatch(peft_vocabulary.plain(f"{PREFIX}{name}")) is not None:
        return f"PEFT's names begin with {PREFIX!r}"
    known = (reason for part, reason in REASONS.items() if part in name)
    return next(known, f"it is not a lora_A or lora_B of {', '.join(modules)}")


def _plan(
    place: tuple[int, str],
    names: dict[str, str],
    file: SafetensorsFile,
    config: PeftConfig,
    shapes: LoraShapes,
) -> AdapterTensors:
    layer, module = place
    given = next(iter(names.values()))
    known = module if module in given else module.replace("mlp.", "block_sparse_moe.", 1)
    path = given[len(PREFIX) : given.index(known) + len(known)]  # the name that the config's patterns match
    parts = shapes.parts(layer, module)
    inputs, outputs = shapes.modules[parts[0]][0], sum(shapes.modules[part][1] for part in parts)
    if names.keys() != {"bias"}:
        needed = config.roles("linear")
        first = next(name for role, name in names.items() if role != "bias")
        if f"{path}.weight".endswith(tuple(f".{name}" for name in config.parameters)):
            path = f"{path}.weight"  # PEFT has it as a parameter
        else:
            config.targets.check(first, path)
        for role in needed:
            if role not in names:
                label = f"lora_{role}" if role in "AB" else role
                raise refusal(first, f"its {label} is missing")
        for role in names.keys() - set(needed) - {"bias"}:
            raise refusal(names[role], f"the config does not ask for a {role} (use_dora, lora_bias)")
        rank = config.rank(path)
        file.check_shape(names["A"], (rank, inputs))
        file.check_shape(names["B"], (outputs, rank))
    if "bias" in names and not config.biases:
        raise refusal(names["bias"], "the config's bias is 'none'")
    for role in names.keys() - {"A", "B"}:
        file.check_shape(names[role], (outputs,))
    return AdapterTensors(tuple((layer, part) for part in parts), names, config.scaling(path))


def _read(
    file: SafetensorsFile, plan: AdapterTensors, shapes: LoraShapes
) -> Iterator[tuple[Site, tuple[LoraPair | None, DoraBias | None]]]:
    """The adapter's change of each site. All tensors but A have a row for each output."""
    tensors = {role: file.read_finite(name) for role, name in plan.names.items()}
    if "lora_bias" in tensors:
        tensors["lora_bias"] = tensors["lora_bias"].float() * plan.scaling
    first = 0
    for site in plan.sites:
        rows = slice(first, first + shapes.modules[site[1]][1])
        own = {role: tensor[rows] for role, tensor in tensors.items() if role != "A"}
        pair = LoraPair(tensors["A"], transposed(own.pop("B")), plan.scaling) if "A" in tensors else None
        dora_bias = DoraBias(own.get("magnitude"), own.get("lora_bias"), own.get("bias")) if own else None
        yield site, (pair, dora_bias)
        first = rows.stop
