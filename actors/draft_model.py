"""Loads the model or the trained head that guesses, and checks that it belongs to the served model."""

from collections.abc import Callable
from pathlib import Path

import torch

from personae.actors.options import OWN_MTP, EngineOptions
from personae.engine.checkpoints import open_checkpoint
from personae.engine.checkpoints.listing import listing
from personae.engine.heads.head import Head
from personae.engine.heads.loader import is_head, load_head
from personae.engine.heads.mtp_loader import has_mtp
from personae.engine.loader import load_model
from personae.engine.models.decoder import Decoder
from personae.engine.packed_weights import PackedWeights
from personae.engine.tokens import Tokenizer
from personae.errors import LoadError, ModelLoadError, as_json


def chosen_speculation(options: EngineOptions, device: torch.device) -> str:
    """`--speculate`, or what it is by default: `auto` where it was measured to pay, on a CPU, and where the
    model that guesses is named."""
    if options.speculate is not None:
        return options.speculate
    return "auto" if device.type == "cpu" or options.draft_model is not None else "off"


def load_draft_model(
    options: EngineOptions,
    model: Decoder,
    tokenizer: Callable[[], Tokenizer],
    device: torch.device,
    packed: PackedWeights | None = None,
) -> Decoder | Head | None:
    """Load the model or the head of `--draft-model`. None if none is used. `tokenizer`
    returns the served model's. `packed`: see `load_model`.

    Raises LoadError if the options contradict each other or the tokens differ, and ModelLoadError if the
    model cannot be loaded.
    """
    path = options.draft_model
    if path is None:
        if options.speculate == "draft":
            raise LoadError("--speculate draft needs a second model: --draft-model DIR.")
        return None
    if options.speculate not in (None, "draft", "auto"):
        raise LoadError("--draft-model needs --speculate draft or --speculate auto.")
    try:
        if path == OWN_MTP or is_head(path):
            return _head(path, options, model, tokenizer)
        _check_tokens(Tokenizer.load(path), tokenizer())
        if any(spec is not None and spec.state for spec in open_checkpoint(path).config().kv_specs):
            raise ModelLoadError("models whose layers have states cannot guess.")
        return load_model(
            path,
            device=device,
            dtype=options.dtype if options.dtype != "auto" else str(model.dtype).removeprefix("torch."),
            quantize=options.quantize,
            max_position=options.max_model_len,
            packed=packed,
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"--draft-model {path}: {error.message}") from error


def _head(path: Path, options: EngineOptions, model: Decoder, tokenizer: Callable[[], Tokenizer]) -> Head:
    if path == OWN_MTP:
        path = options.model
        if not has_mtp(path):
            raise ModelLoadError(
                "The served model's files name no MTP layer (num_nextn_predict_layers in config.json)."
            )
    elif (path / "tokenizer.json").is_file():
        _check_tokens(Tokenizer.load(path), tokenizer())
    longest = options.max_model_len or model.config.max_position
    return load_head(path, model, quantize=options.quantize, max_position=longest)


def _check_tokens(draft: Tokenizer, tokenizer: Tokenizer) -> None:
    """Raises ModelLoadError if a text stands for another token in the draft model. Padding at the end of a
    vocabulary may differ."""
    mine, theirs = (each.backend.get_vocab(with_added_tokens=True) for each in (draft, tokenizer))
    if mine == theirs:
        return
    differ = sorted(token for token in {*mine, *theirs} if mine.get(token) != theirs.get(token))
    some = listing([as_json(token) for token in differ[:3]])
    raise ModelLoadError(
        f"This model has other tokens than the served one, so it cannot guess for it: {len(differ)} of "
        f"{len(theirs)} differ, such as {some}. Use a model with "
        "the same tokenizer."
    )
