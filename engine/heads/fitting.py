"""Checks that a head was made for the served model, and fills it from its files."""

from collections.abc import Mapping

from personae.engine.checkpoints.base import StoredTensor
from personae.engine.checkpoints.listing import listing
from personae.engine.heads.head import Head
from personae.engine.models.decoder import Decoder
from personae.engine.quantization.base import load
from personae.errors import ModelLoadError


def check_sizes(model: Decoder, *, hidden_size: int, vocab_size: int) -> None:
    """Raises ModelLoadError if the head was made for a model of other sizes."""
    for name, own, theirs in (
        ("hidden states of width", hidden_size, model.config.hidden_size),
        ("a vocabulary of", vocab_size, model.config.vocab_size),
    ):
        if own != theirs:
            raise ModelLoadError(
                f"This head is for a model with {name} {own}; the served model has {theirs}. Use a head that "
                "was trained for the served model."
            )


def fill(head: Head, stored: Mapping[str, StoredTensor]) -> None:
    """Copies the tensors into the head's parameters and packs these.

    Raises ModelLoadError: names each missing, unexpected or mis-shaped tensor.
    """
    places = dict(head.tensors())
    _check_tensors({name: tuple(place.shape) for name, place in places.items()}, stored)
    for name, place in places.items():
        load(name, place, stored[name])
    head.pack()


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
