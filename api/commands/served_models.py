"""`personae ps`: what a running server serves."""

from typing import Any

from personae.api.commands.remote import checked, server
from personae.api.commands.table import show, show_json


def run(url: str, key: str | None, *, json: bool) -> None:
    """Print the models of a server, with what their engines do where there are several. Raises RequestError
    if it does not answer or refuses."""
    with server(url, key) as client:
        models: list[dict[str, Any]] = checked(client.get("/v1/models")).json()["data"]
    if json:
        show_json(models)
        return
    rows = [
        (each["id"], each.get("parent"), each.get("state", "running"), each.get("max_model_len"))
        for each in models
    ]
    show(rows, ("name", "base", "state", "context"))
