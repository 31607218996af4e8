"""`personae ps`: what a running server serves."""

from typing import Any

import httpx
import typer

from personae.api.commands.remote import refusal, server_root, unreachable
from personae.api.commands.table import show, show_json


class ServedModelsFailed(Exception):
    """The server did not say what it serves."""


def show_served(url: str, key: str | None, *, json: bool) -> None:
    """Print the models of a server, with what their engines do where there are several. Raises
    ServedModelsFailed."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        response = httpx.get(f"{server_root(url)}/v1/models", headers=headers, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServedModelsFailed(unreachable(url, error)) from None
    if response.is_error:
        raise ServedModelsFailed(refusal(response))
    models: list[dict[str, Any]] = response.json()["data"]
    if json:
        show_json(models)
        return
    rows = [
        (each["id"], each.get("parent"), each.get("state", "running"), each.get("max_model_len"))
        for each in models
    ]
    show(rows, ("name", "base", "state", "context"))


def run(url: str, key: str | None, *, json: bool) -> None:
    """Print them, or the reason why not and exit with 1."""
    try:
        show_served(url, key, json=json)
    except ServedModelsFailed as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(1) from None
