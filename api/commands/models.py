"""`personae models`: the families of models, and the formats of weights."""

import msgspec
import typer

from personae.api.commands.table import show, show_json
from personae.engine.checkpoints.compared import compared
from personae.engine.checkpoints.gguf.architectures import ARCHITECTURES
from personae.engine.checkpoints.gguf.tensors import SERVED
from personae.engine.checkpoints.quantized import FORMATS
from personae.engine.models import MODEL_TYPES, WHOLE
from personae.engine.quantization import KEPT, QUANTIZATIONS


class FamilyEntry(msgspec.Struct, frozen=True):
    """A family. gguf: its name in GGUF files, None if such files are refused. tested: the dtypes in which it
    is compared with transformers. formats: what came of that in checkpoints that tools wrote, by format:
    "equal", or why not."""

    architecture: str
    model_type: str
    gguf: str | None
    tested: list[str]
    formats: dict[str, str]


class Supported(msgspec.Struct, frozen=True):
    """quantize: the values of `--quantize`. quant_methods: of checkpoints in safetensors. gguf: the types of
    GGUF tensors. gguf_kept: the types that stay in their bits; other types become the model's dtype."""

    families: list[FamilyEntry]
    quantize: list[str]
    quant_methods: list[str]
    gguf: list[str]
    gguf_kept: list[str]


def run(*, json: bool) -> None:
    """Print them."""
    found = supported()
    if json:
        show_json(found)
        return
    rows = [
        (each.architecture, each.model_type, each.gguf, ", ".join(each.tested)) for each in found.families
    ]
    show(rows, ("architecture", "model type", "gguf", "compared with transformers in"))
    others = [name for name in found.gguf if name not in found.gguf_kept]
    typer.echo(f"\n--quantize: {', '.join(found.quantize)}")
    typer.echo(f"Quantized safetensors: {', '.join(found.quant_methods)}")
    typer.echo(f"GGUF in its bits: {', '.join(found.gguf_kept)}")
    typer.echo(f"GGUF, dequantized when it is loaded: {', '.join(others)}")


def supported() -> Supported:
    """What this version serves."""
    found = compared()
    gguf = {architecture.name: name for name, architecture in ARCHITECTURES.items()}
    families = [
        FamilyEntry(
            architecture,
            kind,
            gguf.get(architecture),
            ["float32", "bfloat16", "float16"] if kind in WHOLE else ["float32"],
            found.of_family(kind) or found.of_family(f"{kind}_text"),
        )
        for kind, architecture in MODEL_TYPES.items()
    ]
    return Supported(
        families,
        list(QUANTIZATIONS),
        list(FORMATS),
        sorted(kind.name for kind in SERVED),
        list(KEPT),
    )
