"""`personae adapters`: the routes of `/v1/adapters`, from a shell."""

from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from personae.api.adapters.push import upload
from personae.api.commands.command_line import JsonOption, KeyOption, UrlOption, reporting
from personae.api.commands.remote import URL, checked, server
from personae.api.commands.table import show, show_json
from personae.errors import RequestError
from personae.kernels.sizes import size_text

if TYPE_CHECKING:
    import httpx

app = typer.Typer(help="The adapters of a running server.", no_args_is_help=True)

_AT_ONCE = 3  # the server takes four uploads of a tenant at a time


TenantOption = Annotated[
    str | None, typer.Option(help="Whose adapter it is, if not the key's; needs an admin's key.")
]


@app.command()
@reporting
def push(
    folders: Annotated[
        list[str],
        typer.Argument(
            help="Folders as PEFT writes them, or sources that the server fetches, as hf://org/name@REVISION.",
            metavar="DIR|SOURCE...",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="The name of a single adapter; else the folder's.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace adapters of these names.")] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="Publish them to all tenants; needs an admin's key.")
    ] = False,
    url: UrlOption = URL,
    key: KeyOption = None,
    tenant: Annotated[
        str | None, typer.Option(help="The tenant that gets them; needs an admin's key.")
    ] = None,
) -> None:
    """Upload adapters, each with a line when it is done. They can be used at once."""
    if name is not None and len(folders) > 1:
        raise RequestError("--name is for one folder; several have their folders' names.", param="name")
    fields = {"replace": "true"} if replace else {}
    fields |= {"shared": "true"} if shared else {}

    def push_one(client: "httpx.Client", folder: str) -> str:
        if "://" in folder:
            named: dict[str, object] = {} if name is None else {"name": name}
            body = {"source": folder, "replace": replace, "shared": shared} | named
            return _line(checked(client.post("/v1/adapters", json=body)).json())
        return _line(upload(client, Path(folder), fields | {"name": name or _name(folder)}))

    if len(folders) == 1:
        with server(url, key, tenant) as client:
            typer.echo(push_one(client, folders[0]))
        return
    failed = 0
    with server(url, key, tenant) as client, ThreadPoolExecutor(_AT_ONCE) as pool:
        for done in as_completed(tasks := {pool.submit(push_one, client, each): each for each in folders}):
            try:
                typer.echo(done.result())
            except RequestError as error:
                failed += 1
                typer.echo(f"{_name(tasks[done])}: {error.message}", err=True)
    if failed:
        raise RequestError(f"{failed} of {len(folders)} adapters were not uploaded.")


def _line(record: dict[str, Any]) -> str:
    return f"{record['name']} version {record['version']} sha256 {record['sha256']}"


def _name(folder: str) -> str:
    """A folder's own name, or a source as it is."""
    return folder if "://" in folder else Path(folder).resolve().name


@app.command("list")
@reporting
def list_adapters(
    url: UrlOption = URL,
    key: KeyOption = None,
    tenant: Annotated[
        str | None, typer.Option(help="Those of this tenant, * for all; needs an admin's key.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show all adapters that the key may use. Those that the server was started with come first."""
    with server(url, key, tenant) as client:
        records = checked(client.get("/v1/adapters")).json()["data"]
        cards = checked(client.get("/v1/models")).json()["data"] if tenant is None else []
    uploaded = {record["name"] for record in records}
    own = [card for card in cards if card["parent"] is not None and card["id"] not in uploaded]
    if json:
        show_json(
            [
                *({"name": card["id"], "uploaded": False} for card in own),
                *({**record, "uploaded": True} for record in records),
            ]
        )
        return
    rows: list[tuple[object, ...]] = [
        ("", card["id"], "", card.get("rank") or "", "", "", "the server's own") for card in own
    ]
    rows += [
        (
            record.get("tenant", ""),
            record["name"],
            record["version"],
            str(max(record["ranks"].values(), default=0)),
            ",".join(record["targets"]),
            size_text(record["bytes"]),
            "shared" if record["shared"] else "",
        )
        for record in records
    ]
    show(rows, ("tenant", "name", "version", "rank", "targets", "size", "note"))


@app.command()
@reporting
def versions(name: str, url: UrlOption = URL, key: KeyOption = None, json: JsonOption = False) -> None:
    """Show the versions of an adapter that are kept. Requests name one as NAME@N."""
    with server(url, key) as client:
        served = checked(client.get(_path(name))).json()
        records = checked(client.get(f"{_path(name)}/versions")).json()["data"]
    if json:
        show_json(records)
        return
    rows = [
        (
            f"{record['name']}@{record['version']}",
            record["sha256"][:12],
            size_text(record["bytes"]),
            _note(record, served),
        )
        for record in records
    ]
    show(rows, ("version", "sha256", "size", "note"))


@app.command()
@reporting
def pin(
    name: str, version: int, url: UrlOption = URL, key: KeyOption = None, tenant: TenantOption = None
) -> None:
    """Have NAME mean this version from now on, whatever is pushed later."""
    _pin(name, version, url, key, tenant)


@app.command()
@reporting
def unpin(name: str, url: UrlOption = URL, key: KeyOption = None, tenant: TenantOption = None) -> None:
    """Have NAME mean its newest version again."""
    _pin(name, None, url, key, tenant)


@app.command("keep-loaded")
@reporting
def keep_loaded(
    name: str,
    off: Annotated[bool, typer.Option("--off", help="No longer.")] = False,
    url: UrlOption = URL,
    key: KeyOption = None,
    tenant: TenantOption = None,
) -> None:
    """Keep what NAME means on the device, so that no request waits for it. Needs an admin's key."""
    with server(url, key, tenant) as client:
        record = checked(client.patch(_path(name), json={"keep_loaded": not off})).json()
    typer.echo(f"{record['name']}@{record['version']} {'may leave' if off else 'stays on'} the device")


@app.command()
@reporting
def rollback(name: str, url: UrlOption = URL, key: KeyOption = None, tenant: TenantOption = None) -> None:
    """Pin NAME to the version before the one that it means now."""
    with server(url, key, tenant) as client:
        served = checked(client.patch(_path(name), json={})).json()
    earlier = [number for number in served["versions"] if number < served["version"]]
    if not earlier:
        raise RequestError(f"There is no version of {name} before {served['version']}.")
    _pin(name, max(earlier), url, key, tenant)


@app.command()
@reporting
def defaults(
    name: str,
    file: Annotated[
        typer.FileText | None,
        typer.Argument(help="JSON with fields to change; null removes one. - is stdin.", metavar="FILE"),
    ] = None,
    url: UrlOption = URL,
    key: KeyOption = None,
    tenant: TenantOption = None,
) -> None:
    """Show what requests get that leave fields out, or change it: for what NAME means now, or for NAME@N."""
    body: dict[str, Any] = {}
    if file is not None:
        try:
            body = {"defaults": msgspec.json.decode(file.read())}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"{file.name} is not JSON: {error}.", param="file") from None
    with server(url, key, tenant) as client:
        show_json(checked(client.patch(_path(name), json=body)).json()["defaults"])


@app.command()
@reporting
def alias(
    name: str,
    targets: Annotated[
        list[str], typer.Argument(help="Models with their weights, as support@1=95 support@2=5.")
    ],
    shared: Annotated[bool, typer.Option("--shared", help="For all tenants; needs an admin's key.")] = False,
    url: UrlOption = URL,
    key: KeyOption = None,
    tenant: TenantOption = None,
) -> None:
    """Split the requests that name NAME among models, by weight."""
    weights = {}
    for target in targets:
        model, _, weight = target.rpartition("=")
        try:
            weights[model] = float(weight)
        except ValueError:
            raise RequestError(f"'{target}' is not MODEL=WEIGHT.", param="targets") from None
    body = {"targets": weights, "shared": shared}
    with server(url, key, tenant) as client:
        checked(client.put(f"/v1/adapter_aliases/{quote(name, safe='')}", json=body))
    typer.echo(f"{name} splits its requests: {', '.join(targets)}")


@app.command()
@reporting
def unalias(name: str, url: UrlOption = URL, key: KeyOption = None, tenant: TenantOption = None) -> None:
    """Remove an alias."""
    with server(url, key, tenant) as client:
        checked(client.delete(f"/v1/adapter_aliases/{quote(name, safe='')}"))
    typer.echo(f"{name} is no alias any more")


def _pin(name: str, version: int | None, url: str, key: str | None, tenant: str | None) -> None:
    with server(url, key, tenant) as client:
        answer = checked(client.patch(_path(name), json={"pinned": version})).json()
    typer.echo(f"{name} is {name}@{answer['version']}{', pinned' if answer['pinned'] else ''}")


def _note(record: dict[str, Any], served: dict[str, Any]) -> str:
    if record["version"] != served["version"]:
        return ""
    return "pinned" if served["pinned"] else "served"


def _path(name: str) -> str:
    return f"/v1/adapters/{quote(name, safe='')}"


@app.command()
@reporting
def remove(
    name: str,
    url: UrlOption = URL,
    key: KeyOption = None,
    tenant: TenantOption = None,
) -> None:
    """Remove an adapter with all its versions, or NAME@N alone. Requests that use it finish."""
    with server(url, key, tenant) as client:
        checked(client.delete(_path(name)))
    typer.echo(f"{name} removed")
