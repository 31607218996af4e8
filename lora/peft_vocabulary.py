"""Reads the tensors that change the embedding or the output matrix, by PEFT's names."""

import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from personae.errors import AdapterError
from personae.lora.base import fingerprint
from personae.lora.dora import DoraBias
from personae.lora.peft_config import PeftConfig
from personae.lora.peft_names import refusal
from personae.lora.safetensors_file import SafetensorsFile
from personae.lora.shapes import LoraShapes
from personae.lora.single import transposed
from personae.lora.vocabulary import LowRank, Place, Rows, VocabularyChange

PATHS: dict[str, Place] = {"model.embed_tokens": "embedding", "lm_head": "output"}
ROLES = {
    "lora_embedding_A": "A",
    "lora_embedding_B": "B",
    "lora_A.weight": "A",
    "lora_B.weight": "B",
    "lora_B.bias": "lora_bias",
    "lora_magnitude_vector": "magnitude",
    "base_layer.weight": "copy",
    "weight": "full",
    "token_adapter.trainable_tokens_delta": "tokens",
}
NAME = re.compile(
    rf"base_model\.model\.({'|'.join(map(re.escape, PATHS))})\.({'|'.join(map(re.escape, ROLES))})"
)

DECODER = "base_model.model.model."

VECTORS = {"magnitude", "lora_bias"}
"""The roles of vectors that a low-rank change may have."""

Found = dict[str, dict[str, str]]
"""By path and role: the tensor's name."""


def plain(name: str) -> str:
    """A tensor's name for a base without a part for images, and without the adapter's name, which older
    versions of PEFT put before the last part."""
    name = re.sub(r"\.default(\.weight|\.bias|)$", r"\1", name)
    name = re.sub(
        r"^base_model\.model\.(model\.language_model|language_model\.model|backbone)\.", DECODER, name
    )
    return name.replace("base_model.model.language_model.lm_head.", "base_model.model.lm_head.", 1)


def find(names: Iterable[str]) -> Found:
    """The names of tensors that change the vocabulary. Other names are ignored."""
    found: Found = {}
    for name in names:
        match = NAME.fullmatch(plain(name))
        if match is not None:
            roles = found.setdefault(match[1], {})
            role = ROLES[match[2]]
            if role in roles:
                raise refusal(name, f"it is the same tensor as {roles[role]!r}")
            roles[role] = name
    return found


def tensor_name(change: VocabularyChange, tensor: str) -> str:
    """PEFT's name for one of a change's tensors."""
    place = change.places[0]
    path = next(path for path, known in PATHS.items() if known == place)
    low_rank = {"a": "A", "b": "B"}.get(tensor, tensor)
    if isinstance(change, Rows):
        low_rank = "full" if change.ids is None else "tokens"
    suffix = [suffix for suffix, role in ROLES.items() if role == low_rank]
    return f"base_model.model.{path}.{suffix[0 if place == 'embedding' else -1]}"


def read(
    file: SafetensorsFile, found: Found, config: PeftConfig, shapes: LoraShapes
) -> tuple[VocabularyChange, ...]:
    """The changes, checked against the base and the config. Raises AdapterError with the tensor's name."""
    changes: list[VocabularyChange] = []
    for path, roles in sorted(found.items()):
        if shapes.vocabulary is None:
            raise refusal(next(iter(roles.values())), "this base's vocabulary cannot be changed")
        changes += _read_place(file, path, roles, config, shapes, shapes.vocabulary)
    for path, ids in config.trained_tokens.items():
        if ids and "tokens" not in found.get(path, {}) and not _is_other_end(path, config, shapes):
            raise AdapterError(
                f"adapter_config.json: trainable_token_indices names {path}, but there are no rows for it",
                param="trainable_token_indices",
            )
    for path in config.saved:
        if "full" not in found.get(path, {}):
            raise AdapterError(
                f"adapter_config.json: modules_to_save names {path}, but there is no weight for it",
                param="modules_to_save",
            )
    places = [place for change in changes for place in change.places]
    if len(set(places)) != len(places):
        raise AdapterError("the embedding or the output matrix is changed in two ways at once")
    return tuple(changes)


def _is_other_end(path: str, config: PeftConfig, shapes: LoraShapes) -> bool:
    """Whether a tied output matrix has its rows from the embedding: PEFT stores one tensor for both."""
    tokens = config.trained_tokens
    return shapes.tied and PATHS[path] == "output" and tokens[path] == tokens.get("model.embed_tokens")


def _read_place(
    file: SafetensorsFile,
    path: str,
    roles: Mapping[str, str],
    config: PeftConfig,
    shapes: LoraShapes,
    vocabulary: tuple[int, int],
) -> Iterator[VocabularyChange]:
    place = PATHS[path]
    tokens, hidden = vocabulary
    for role in roles.keys() & {"copy", "full"}:
        shape = file.entries[roles[role]].shape
        if shape[1:] == (hidden,) and shape[0] > tokens:
            raise refusal(
                roles[role],
                f"it has {shape[0]} tokens, the base {tokens}; adapters cannot add tokens, so train without "
                "new ones, or with ones that the base has and does not use (trainable_token_indices)",
            )
    if "copy" in roles:
        name = roles["copy"]
        if not fingerprint(file.read_checked(name, vocabulary)).matches(shapes.copies.get(place)):
            raise refusal(
                name, "it differs from this base's; save the adapter without it or train it in full"
            )
    if "full" in roles:
        rows = file.read_checked(roles["full"], vocabulary)
        if not fingerprint(rows).matches(shapes.copies.get(place)):
            yield Rows((place,), None, rows)
    if "tokens" in roles:
        name, ids = roles["tokens"], config.trained_tokens.get(path, ())
        if not ids:
            raise refusal(name, "the config's trainable_token_indices does not name its tokens")
        if max(ids) >= tokens:
            raise refusal(name, f"token {max(ids)} is not in the base's vocabulary of {tokens}")
        rows = file.read_checked(name, (len(ids), hidden))
        both = shapes.tied and place == "embedding" and config.trained_tokens.get("lm_head", ids) == ids
        order = torch.tensor(sorted(range(len(ids)), key=ids.__getitem__))
        places: tuple[Place, ...] = ("embedding", "output") if both else (place,)
        yield Rows(places, torch.tensor(sorted(ids)), rows[order].contiguous())
    if roles.keys() & {"A", "B", "lora_bias", "magnitude"}:
        yield _low_rank(file, path, roles, config, vocabulary)


def _low_rank(
    file: SafetensorsFile,
    path: str,
    roles: Mapping[str, str],
    config: PeftConfig,
    vocabulary: tuple[int, int],
) -> LowRank:
    place, rank, scaling = PATHS[path], config.rank(path), config.scaling(path)
    tokens, hidden = vocabulary
    inputs, outputs = (tokens, hidden) if place == "embedding" else (hidden, tokens)
    if config.invocation:
        raise refusal(next(iter(roles.values())), f"activated LoRA on {path} is not supported")
    name = next(roles[role] for role in ("A", "B", *VECTORS) if role in roles)
    last = path.rpartition(".")[2]
    config.targets.check(name, name[len("base_model.model.") : name.index(last) + len(last)])
    for role in config.roles(place):
        if role not in roles:
            raise refusal(name, f"its {role} is missing")
    for role in roles.keys() & VECTORS:
        if role not in config.roles(place):
            raise refusal(roles[role], f"the config does not ask for a {role}")
    found = {role: file.read_checked(roles[role], (outputs,)) for role in roles.keys() & VECTORS}
    lora_bias = found.get("lora_bias")
    dora_bias = DoraBias(found.get("magnitude"), None if lora_bias is None else lora_bias.float() * scaling)
    a = file.read_checked(roles["A"], (rank, inputs))
    b = file.read_checked(roles["B"], (outputs, rank))
    return LowRank(place, a, transposed(b), scaling, dora_bias)
