"""`personae plan`: how to share devices between replicas and ranks, and what to expect of that."""

from pathlib import Path

import torch
import typer

from personae.actors.deployment.devices import Device, parse_devices
from personae.actors.deployment.estimate import Estimate, Load, estimates
from personae.actors.options import Dtype
from personae.api.commands.table import show
from personae.api.hub.resolve import on_disk
from personae.api.local import engine_options_of
from personae.api.options import ServeOptions
from personae.engine.checkpoints import open_checkpoint
from personae.engine.loader import describe
from personae.errors import LoadError
from personae.kernels.sizes import size_text

SHOWN = 8  # layouts


def run(model: Path, devices: str, load: Load, *, dtype: Dtype = "auto", quantize: str | None = None) -> bool:
    """Print the layouts, the best first, and return whether one can answer the load. `model` is given as to
    `personae serve`. Raises LoadError for a wrong model, devices or load."""
    count, device = parse_devices(devices)
    kind = torch.device("cuda" if device.gpu else "cpu")
    told, _ = engine_options_of(on_disk(ServeOptions(model)))
    described = describe(open_checkpoint(told.model), device=kind, dtype=dtype, quantize=quantize)
    found = estimates(described, device, count, load)
    typer.echo(
        f"{described.name}, {described.form}, on {count} {device.name}: {load.rate:g} requests/s of "
        f"{load.prompt} + {load.answer} tokens"
    )
    rows = [_row(each) for each in found[:SHOWN]]
    show(rows, ("tensor x stages x replicas", "weights", "KV cache", "at a time", "first", "gap", "at most"))
    best = next(each for each in found if each.layout.runs)
    if best.problem is not None or best.most <= load.rate:
        typer.echo(f"Not enough: {best.problem or f'at most {best.most:.2g} requests/s'}.")
        return False
    typer.echo(f"Best: {_command(best, model, device, load, quantize)}")
    if not found[0].layout.runs and found[0].problem is None:
        typer.echo("Personae does not attend by sequences in several stages so far.")
    if device.gpu and best.layout.ranks > 1:
        typer.echo("Nobody has run ranks on GPUs so far.")
    return True


def _row(found: Estimate) -> tuple[str, ...]:
    layout = found.layout
    size = f"{layout.tensor} x {layout.stages} x {layout.replicas}"
    if layout.attention > 1:
        size = f"{layout.attention} by sequences x {layout.stages} x {layout.replicas}"
    weights = size_text(found.weight_bytes, needed=True)
    if found.problem is not None:
        return size, weights, found.problem, "", "", "", ""
    rate = f"{found.most:.2f}/s"
    if found.first == float("inf"):
        return size, weights, f"{found.kv_tokens} tokens", "", "too many", "", rate
    first, gap = f"{found.first * 1000:.0f} ms", f"{found.gap * 1000:.1f} ms"
    return size, weights, f"{found.kv_tokens} tokens", f"{found.rows:.1f}", first, gap, rate


def _command(found: Estimate, model: Path, device: Device, load: Load, quantize: str | None) -> str:
    sizes = (
        ("tensor-parallel-size", found.layout.tensor * found.layout.attention),
        ("expert-parallel-size", found.layout.attention),
        ("pipeline-parallel-size", found.layout.stages),
        ("replicas", found.layout.replicas),
    )
    options = [f"--{name} {size}" for name, size in sizes if size > 1]
    options += ["--enable-dp-attention"] if found.layout.attention > 1 else []
    options += [f"--quantize {quantize}"] if quantize else []
    kind = "cuda" if device.gpu else "cpu"
    return " ".join(
        ["personae serve", str(model), f"--device {kind}", f"--max-model-len {load.context}", *options]
    )


def checked_load(rate: float, prompt: int | None, answer: int | None, context: int) -> Load:
    """The load of the options. Without `prompt` it is half of the context, at most 1,024 tokens, and without
    `answer` a quarter, at most 256."""
    if not 0 < rate < float("inf"):
        raise LoadError(f"--rate {rate:g}: it must be a positive number.")
    return Load(rate, prompt or min(1024, context // 2), answer or max(min(256, context // 4), 1), context)
