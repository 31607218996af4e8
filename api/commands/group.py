"""All commands, and what replaces the commands of other programs here."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

COMMANDS = {
    "bench": "personae.evals.bench.cli",
    "eval": "personae.evals.cli",
    "simulate": "personae.evals.simulate",
}
"""Where each command is. It is imported only when it is used, because imports go down only."""


ELSEWHERE = {
    "delete": "`personae rm` removes a downloaded model.",
    "download": "`personae pull` downloads a model or an adapter.",
    "ls": "`personae list` shows what was downloaded, `personae ps` what a running server serves.",
    "start": "`personae serve` serves a model.",
    "stop": "Ctrl-C or SIGTERM stops `personae serve`.",
}
"""Commands of other programs, and what to use here."""


class CommandGroup(TyperGroup):
    """The commands of the server, and those of `evals/`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return [*super().list_commands(ctx), *COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name."""
        if cmd_name not in COMMANDS:
            found = super().get_command(ctx, cmd_name)
            if found is None and cmd_name in ELSEWHERE:
                ctx.fail(f"There is no `personae {cmd_name}`. {ELSEWHERE[cmd_name]}")
            return found
        holder = typer.Typer(add_completion=False, rich_markup_mode=None)
        holder.add_typer(import_module(COMMANDS[cmd_name]).app, name=cmd_name)
        _group(holder)
        return get_command(holder).commands[cmd_name]  # type: ignore[attr-defined]  # it is a group


def _group(holder: typer.Typer) -> None:
    @holder.callback()
    def others() -> None:
        """Make the holder a group."""
