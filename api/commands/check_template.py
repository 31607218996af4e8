"""`personae check-template`: what a chat template shows, as a table."""

from pathlib import Path

import typer

from personae.api.bundled import bundled, check_model, is_model
from personae.api.commands.table import show
from personae.api.family import Family
from personae.api.hub.download import fetched
from personae.api.hub.files import template_files
from personae.api.hub.names import hub_name
from personae.engine.tokens import Tokenizer
from personae.errors import ModelLoadError
from personae.grammar.reasoning.registry import find_reasoning_format
from personae.grammar.tools.registry import find_tool_format

_SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""For a template without a tokenizer."""


def run(source: Path | None) -> None:
    """Print the traits of a template file, or of a model's templates. Raises LoadError."""
    family = _family_of(source)
    templates = {"default": family.template, "tool_use": family.tool_template}
    known = {name: template for name, template in templates.items() if template is not None}
    if not known:
        raise ModelLoadError("This model has no chat template.")
    tools, reasoning = (format.name if format else "none" for format in (family.tools, family.reasoning))
    typer.echo(f"tool format {tools}, reasoning format {reasoning}\n")
    tables = [template.traits.table() for template in known.values()]
    rows = [(row[0][0], *(value for _, value in row)) for row in zip(*tables, strict=True)]
    show(rows, ["part of a conversation", *known])
    for name, template in known.items():
        if template.traits.user == "refused":
            unset = ", ".join(template.unset_variables) or "none"
            typer.echo(
                f"\nThe template {name} shows no message. The variables that only requests set: {unset}."
            )


def _family_of(source: Path | None) -> Family:
    if source is not None and source.is_file() and not is_model(source):
        try:
            text = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{source} cannot be read: {error}.") from None
        tools, reasoning = find_tool_format(text), find_reasoning_format(text)
        templates, found = Family.compiled({"default": text}, _SPECIAL_TOKENS, tools, reasoning)
        return Family(templates["default"], tools=found, reasoning=reasoning)
    if (ours := bundled(source)) is not None:
        return Family.of(Tokenizer.load(ours.model))
    assert source is not None, "no model is a bundled one"
    try:
        check_model(source)
    except ValueError as error:
        raise ModelLoadError(str(error)) from None
    if not is_model(source) and (name := hub_name(source)) is not None:
        folder, files = fetched(name, template_files)
        source = folder / files[0] if files[0].endswith(".gguf") else folder
    return Family.of(Tokenizer.load(source))
