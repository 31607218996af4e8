"""Options that `personae eval` and `personae bench` share."""

from pathlib import Path
from typing import Annotated

import typer

from personae.actors.options import parse_quantization
from personae.api.commands.command_line import option_parser
from personae.engine.quantization import QUANTIZATIONS

ModelOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Without --url: the model; else the small bundled one (demo)."),
]
AdaptersOption = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="Without --url: folders of adapters.")
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        parser=option_parser(parse_quantization),
        metavar=f"[{'|'.join(QUANTIZATIONS)}]",
        help="How the model's weights are kept.",
    ),
]
