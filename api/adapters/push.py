"""Sends adapters to a running server, for the command line and for trainers."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from personae.api.commands.remote import checked, unreachable
from personae.errors import RequestError

if TYPE_CHECKING:
    import httpx

FILES = ("adapter_config.json", "adapter_model.safetensors")
_PICKLE = "adapter_model.bin"


def upload(client: "httpx.Client", folder: Path, fields: Mapping[str, str]) -> dict[str, Any]:
    """Upload the adapter that PEFT saved in `folder`, with these fields of the form. Returns its record.
    Raises RequestError."""
    import httpx

    if folder.is_dir() and not all((folder / file).exists() for file in FILES):
        raise RequestError(_no_adapter(folder), param="folder")
    with ExitStack() as stack:
        try:
            files = {file: stack.enter_context((folder / file).open("rb")) for file in FILES}
        except OSError as error:
            raise RequestError(f"{error.filename}: {error.strerror}.", param="folder") from None
        try:
            response = client.post("/v1/adapters", data=dict(fields), files=files)
        except httpx.HTTPError as error:
            raise RequestError(unreachable(str(client.base_url), error)) from None
    record: dict[str, Any] = checked(response).json()
    return record


def _no_adapter(folder: Path) -> str:
    """Why the folder is not taken, by what trainers leave in folders without an adapter's files."""
    if (folder / _PICKLE).exists():
        return (
            f"{folder / _PICKLE} is a pickle, and reading one can run code. If you trust it, load the "
            "adapter with PEFT and save it again: `save_pretrained` writes adapter_model.safetensors."
        )
    missing = next(file for file in FILES if not (folder / file).exists())
    inside = [path.parent for path in folder.glob(f"*/{FILES[1]}")]
    if inside:
        newest = max(inside, key=lambda one: one.stat().st_mtime)
        return f"{folder} has no {missing}, but {newest} has an adapter: push that one."
    if any(folder.glob("model*.safetensors")):
        return f"{folder} has a whole model and no {missing}; a merged model is not an adapter."
    return f"{folder} has no {missing}."
