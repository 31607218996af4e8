"""Every family of models in every format of weights: `python -m personae.evals.family_formats`.

A tiny random model of transformers' own class is written by the tool that people use, and loaded here in
float32. The truth is transformers' model with the weights that the tool itself dequantizes, and PEFT's
adapters on it. What is checked is what `personae.evals.families` checks: logits of 100 tokens, 64 greedy
tokens, chunks, a mixed batch, adapters, a cached prefix and preemption. Formats whose library is not there
are named so: llmcompressor, gptqmodel, bitsandbytes, torchao (versions: `tests/support/make_quantized.py`).
llmcompressor changes transformers for the rest of a process: run its formats apart from the others.

    --case glm4_moe     one case; otherwise all
    --format W4A16      one format, repeatable; otherwise all
    --guide             only print the guide's table, from `engine/checkpoints/compared.json`
"""

import tempfile
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from personae.engine.checkpoints.compared import EQUAL, Compared, compared
from personae.errors import ModelLoadError
from personae.evals.kernels import support


def main(
    case: Annotated[str, typer.Option(help="The case; empty: all.")] = "",
    form: Annotated[list[str] | None, typer.Option("--format", help="Only this one. Repeatable.")] = None,
    *,
    guide: Annotated[bool, typer.Option(help="Only print the guide's table.")] = False,
) -> None:
    """Prints each cell and a table of them, and cells that are not as recorded; exits with 1 if there are
    such."""
    if guide:
        print("\n".join(guide_table(compared())))
        return
    warnings.filterwarnings("ignore")  # the tools' own
    formats, models = support("family_formats"), support("family_models")
    names = form or [*formats.FORMATS, *formats.GGUF]
    found: dict[str, dict[str, str]] = {}
    for name in [case] if case else models.CASES:
        found[name] = {}
        for each in names:
            if formats.has(each, name):
                with tempfile.TemporaryDirectory() as folder:
                    found[name][each] = cell(formats, each, name, Path(folder))
                print(f"{name}, {each}: {found[name][each]}", flush=True)
    table = Table("family", *names)
    for name, row in found.items():
        table.add_row(name, *(row.get(each, "").partition(":")[0] for each in names))
    console = Console()
    if not console.is_terminal:
        console.width = 132
    console.print(table)
    said = [text.partition(":")[0] for row in found.values() for text in row.values()]
    print(", ".join(f"{said.count(kind)} {kind}" for kind in dict.fromkeys(said)))
    recorded = {each: compared().cells(each) for each in names}
    changed = [
        f"{name}, {each}: recorded as {recorded[each].get(name)}"
        for name, row in found.items()
        for each, text in row.items()
        if not text.startswith("not installed") and text.partition(":")[0] != recorded[each].get(name)
    ]
    for each in changed:
        print(each)
    if changed:
        raise typer.Exit(1)


def guide_table(known: Compared) -> list[str]:
    """The table of docs/guide/quantization.md."""
    lines = ["| format | tool | equal | the others |", "|---|---|---|---|"]
    for name, form in known.formats.items():
        cells = known.cells(name)
        equal = sum(why == EQUAL for why in cells.values())
        others = "; ".join(f"{why}: {len(cases)}" for why, cases in form.others.items())
        lines.append(f"| {form.title} | {form.tool} | {equal} of {len(cells)} | {others} |")
    return lines


def cell(formats: Any, form: str, case: str, folder: Path) -> str:
    """What one family in one format is: equal, or why not."""
    try:
        checkpoint, plain = formats.make(form, case, folder)
    except ImportError as missing:
        return f"not installed: {missing.name or missing}"
    except Exception as error:  # of any tool, in its own words
        return f"the tool fails: {type(error).__name__}: {error}"
    try:
        with formats.unrounded():
            report = support("family_checks").check_checkpoint(checkpoint, plain, folder)
    except ModelLoadError as refused:
        return f"refused: {refused}"
    return EQUAL if report.passed else f"differs: {report}"


if __name__ == "__main__":
    typer.run(main)
