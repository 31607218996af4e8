"""`personae serve --dry-run`: what a model would take, before it is loaded."""

import typer

from personae.actors.assembly import chosen_device
from personae.actors.footprint import Footprint, footprint
from personae.api.base_models.open import options_by_name
from personae.api.hub.resolve import on_disk
from personae.api.local import engine_options_of
from personae.api.options import ServeOptions
from personae.kernels.sizes import size_text


def run(options: ServeOptions) -> bool:
    """Print it, and return whether the free memory holds it; of several models, each alone. Models and
    adapters on the Hub are downloaded. Raises LoadError for what `serve` would refuse."""
    if not options.models and options.keep_alive is None and options.models_memory is None:
        return _run_one(options)
    fits = [_run_one(each) for each in options_by_name(options).values()]
    return all(fits)


def _run_one(options: ServeOptions) -> bool:
    told, _ = engine_options_of(on_disk(options))
    found = footprint(told, chosen_device(options.device))
    lines = _lines(found, draft=options.draft_model is not None)
    width = max(len(title) for title, _ in lines)
    for title, text in lines:
        typer.echo(f"{title:{width}}  {text}")
    return found.fits


def _lines(found: Footprint, *, draft: bool) -> list[tuple[str, str]]:
    """The table's rows: a title and a text."""
    ranks = "" if found.ranks == 1 else f", {found.ranks} ranks together"
    free = "" if found.free_bytes is None else f" of {size_text(found.free_bytes)} that are free"
    weights, pool = _size(found.weight_bytes), _size(found.adapter_bytes)
    cache, token = size_text(found.kv_bytes), size_text(found.token_bytes)
    read, fastest = _size(found.read_bytes), 100e9 / found.read_bytes
    lines = [
        ("model", f"{found.model}, {found.architecture}, {_count(found.parameters)} parameters"),
        ("device", f"{found.device}{ranks}"),
        ("weights", f"{size_text(found.file_bytes)} in the files, {weights} in memory ({found.format})"),
        ("context", f"{found.max_model_len} tokens"),
        ("KV cache", f"{cache} for {found.kv_tokens} tokens, {token} a token ({found.kv_dtype})"),
        ("adapters", f"{found.adapters} read, {pool} for {found.adapter_ranks} ranks in all modules"),
        ("a step", f"at most {found.max_seqs} sequences and {found.max_batch_tokens} tokens"),
        ("memory", f"{_size(found.needed_bytes)}{free}{'' if found.fits else ': it does not fit'}"),
        ("speed", f"one stream reads {read} of weights a token: at most {fastest:.0f} tokens/s at 100 GB/s"),
    ]
    if draft:
        lines.append(("draft model", "not counted"))
    if found.warning is not None:
        lines.append(("warning", found.warning))
    return lines


def _size(size: int) -> str:
    return size_text(size, needed=True)


def _count(number: int) -> str:
    """A number of parameters as people say it."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"
