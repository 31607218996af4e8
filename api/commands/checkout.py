"""Commands for developers. Only a checkout has them: the wheel has no evals and no simulation."""

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
    "list": "`personae adapters list` shows the adapters of a running server, GET /v1/models all its models.",
    "ls": "`personae adapters list` shows the adapters of a running server, GET /v1/models all its models.",
    "models": "GET /v1/models shows what a running server serves.",
    "ps": "GET /v1/models shows what a running server serves.",
    "pull": "`personae serve org/name` downloads the model and serves it.",
    "run": "`personae serve` serves a model, and `personae chat` talks to it.",
    "start": "`personae serve` serves a model.",
    "stop": "Ctrl-C or SIGTERM stops `personae serve`.",
}
"""Commands of other programs, and what to use here."""


class CheckoutGroup(TyperGroup):
    """The commands of the server, and those of a checkout."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        return [*super().list_commands(ctx), *COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name. In an installation, a command of the checkout prints an error and exits with
        code 2."""
        if cmd_name not in COMMANDS:
            found = super().get_command(ctx, cmd_name)
            if found is None and cmd_name in ELSEWHERE:
                ctx.fail(f"There is no `personae {cmd_name}`. {ELSEWHERE[cmd_name]}")
            return found
        holder = typer.Typer(add_completion=False, rich_markup_mode=None)
        try:
            holder.add_typer(import_module(COMMANDS[cmd_name]).app, name=cmd_name)
        except ModuleNotFoundError as error:
            if error.name != "personae.evals":
                raise
            _add_refusal(holder, cmd_name)
        return get_command(holder).commands[cmd_name]  # type: ignore[attr-defined]  # it is a group


def _add_refusal(holder: typer.Typer, name: str) -> None:
    """The command, for an installation without it."""
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @holder.command(name, help="Not in this installation.", context_settings=anything)
    def refuse() -> None:
        typer.secho(
            f"error: `personae {name}` is not in this installation, which has the server only. Clone the "
            "repository, run `make setup` there, and use its .venv/bin/personae.",
            fg=typer.colors.RED,
            err=True,
        )
        raise typer.Exit(2)

    @holder.callback()
    def others() -> None:
        """Make the holder a group."""
