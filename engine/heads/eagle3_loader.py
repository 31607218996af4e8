"""Loads an EAGLE-3 head from disk."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.huggingface import Folder
from personae.engine.checkpoints.listing import listing
from personae.engine.heads.eagle3 import EMBEDDING, LAYER, Eagle3Head
from personae.engine.heads.eagle3_config import Eagle3Config, read_eagle3_config
from personae.engine.heads.fitting import check_sizes, fill
from personae.engine.models.decoder import Decoder
from personae.engine.quantization import scheme_of
from personae.errors import ModelLoadError

TO_TARGET, TO_DRAFT = "d2t", "t2d"
_PREFIXES = ("model.", "eagle_module.")


def load_eagle3(path: Path, model: Decoder, *, quantize: str | None, max_position: int) -> Eagle3Head:
    """See `load_head`."""
    config = read_eagle3_config(path)
    check_sizes(model, hidden_size=config.target_hidden_size, vocab_size=config.vocab_size)
    _check_layers(config, model.config.layers)
    stored = {_plain(name): tensor for name, tensor in Folder(path).stored().items()}
    numbers = {name: stored.pop(name) for name in (TO_TARGET, TO_DRAFT) if name in stored}
    own = EMBEDDING in stored
    if not own and config.hidden_size != model.config.hidden_size:
        raise ModelLoadError(
            f"{EMBEDDING} is missing, and the served model's has another width: {model.config.hidden_size}, "
            f"not {config.hidden_size}."
        )
    head = Eagle3Head(
        config,
        model.embedding,
        model.config.layers,
        dtype=model.dtype,
        max_position=max_position,
        scheme=scheme_of(quantize),
        own_embedding=own,
    )
    fill(head, stored)
    head.ids.copy_(_ids(config, numbers))
    return head


def _plain(name: str) -> str:
    """A tensor's name in the flat format."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return f"{LAYER}.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _check_layers(config: Eagle3Config, count: int) -> None:
    """Raises ModelLoadError if the head reads a layer that a model with `count` layers does not have."""
    layers = config.layers_of(count)
    if min(layers) < 0 or max(layers) > count or len(set(layers)) < len(layers):
        raise ModelLoadError(
            f"This head reads the layers {listing(map(str, layers))}; the served model has {count} "
            "layers. Use a head that was trained for the served model."
        )


def _ids(config: Eagle3Config, numbers: Mapping[str, StoredTensor]) -> Tensor:
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
