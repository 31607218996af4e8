"""Loads a head from disk, and checks that it was made for the model that it guesses for."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor, dtype_of
from personae.engine.checkpoints.huggingface import Folder
from personae.engine.checkpoints.listing import listing
from personae.engine.heads.config import HeadConfig, read_head_config
from personae.engine.heads.eagle3 import EMBEDDING, LAYER, Eagle3Head
from personae.engine.models.decoder import Decoder
from personae.engine.quantization import scheme_of
from personae.engine.quantization.base import load
from personae.errors import ModelLoadError

TO_TARGET, TO_DRAFT = "d2t", "t2d"
_PREFIXES = ("model.", "eagle_module.")


def load_head(
    path: Path, model: Decoder, *, dtype: str = "auto", quantize: str | None = None, max_position: int
) -> Eagle3Head:
    """Load the EAGLE-3 head in a folder for a model.

    `dtype` "auto" is the model's. `quantize`: see `load_model`. `max_position`: the longest context.

    Raises:
        ModelLoadError: the head is of another model, or names each missing, unexpected or mis-shaped tensor.
    """
    config = read_head_config(path)
    _check_model(config, model)
    stored = {_plain(name): tensor for name, tensor in Folder(path).stored().items()}
    numbers = {name: stored.pop(name) for name in (TO_TARGET, TO_DRAFT) if name in stored}
    own = EMBEDDING in stored
    if not own and config.hidden_size != model.config.hidden_size:
        raise ModelLoadError(
            f"{EMBEDDING} is missing, and the served model's has another width: {model.config.hidden_size}, "
            f"not {config.hidden_size}."
        )
    found = model.dtype if dtype == "auto" else dtype_of("dtype", dtype)
    head = Eagle3Head(
        config,
        model.embedding.to(found),
        model.config.layers,
        dtype=found,
        max_position=max_position,
        scheme=scheme_of(quantize),
        own_embedding=own,
    )
    places = dict(head.tensors())
    _check_tensors({name: tuple(place.shape) for name, place in places.items()}, stored)
    for name, place in places.items():
        load(name, place, stored[name])
    head.ids.copy_(_ids(config, numbers))
    head.pack()
    return head


def _plain(name: str) -> str:
    """A tensor's name in the flat format."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return f"{LAYER}.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _check_model(config: HeadConfig, model: Decoder) -> None:
    """Raises ModelLoadError if the head was made for another model."""
    served = model.config
    for name, own, theirs in (
        ("hidden states of width", config.target_hidden_size, served.hidden_size),
        ("a vocabulary of", config.vocab_size, served.vocab_size),
    ):
        if own != theirs:
            raise ModelLoadError(
                f"This head is for a model with {name} {own}; the served model has {theirs}. Use a head that "
                "was trained for the served model."
            )
    layers = config.layers_of(served.layers)
    if min(layers) < 0 or max(layers) > served.layers or len(set(layers)) < len(layers):
        raise ModelLoadError(
            f"This head reads the layers {listing(map(str, layers))}; the served model has {served.layers} "
            "layers. Use a head that was trained for the served model."
        )


def _check_tensors(expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, StoredTensor]) -> None:
    """Compares the files' tensors with the config."""
    problems = {
        "missing": [name for name in expected if name not in stored],
        "unexpected": [name for name in stored if name not in expected],
        "mis-shaped": [
            f"{name} (expected {list(shape)}, found {list(stored[name].shape)})"
            for name, shape in expected.items()
            if name in stored and stored[name].shape != shape
        ],
        "of an unsupported dtype": [
            f"{name} ({stored[name].dtype})"
            for name in expected
            if name in stored and not stored[name].served
        ],
    }
    found = [f"{what}: {listing(names)}" for what, names in problems.items() if names]
    if found:
        raise ModelLoadError(f"The weights do not match the head's config. Tensors {'; '.join(found)}")


def _ids(config: HeadConfig, numbers: Mapping[str, StoredTensor]) -> Tensor:
    """The model's token for each token of the head. The file has the distance between both."""
    count = config.draft_vocab_size
    own = torch.arange(count)
    if TO_TARGET not in numbers:
        if count != config.vocab_size:
            raise ModelLoadError(f"{TO_TARGET} is missing, which says which tokens the head guesses.")
        return own
    stored = numbers[TO_TARGET]
    if stored.shape != (count,) or stored.dtype not in ("I64", "I32"):
        raise ModelLoadError(
            f"{TO_TARGET} must have {count} integers, found {list(stored.shape)} {stored.dtype}."
        )
    ids = own + stored.read()
    if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise ModelLoadError(f"{TO_TARGET} names tokens outside of the vocabulary of {config.vocab_size}.")
    return ids
