"""Options that `personae eval` and `personae bench` share."""

from pathlib import Path
from typing import Annotated

import typer

ModelOption = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Without --url: the model; else the small bundled one (demo)."),
]
AdaptersOption = Annotated[
    list[Path] | None, typer.Option(metavar="DIR", help="Without --url: folders of adapters.")
]
