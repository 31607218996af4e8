"""`personae tenants` and `personae keys`: they work on the data directory, also while a server runs on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from personae.api.options import parse_size
from personae.errors import LoadError, PersonaeError

if TYPE_CHECKING:
    from personae.api.tenants.store import TenantStore

P = ParamSpec("P")

_OPTIONS = {"bytes": "adapter_bytes"}  # limits that another name asks for

DataDirOption = Annotated[Path, typer.Option("--data-dir", metavar="DIR", help="The server's --data-dir.")]

tenants_app = typer.Typer(help="Who may use the server, and how much.", no_args_is_help=True)
keys_app = typer.Typer(help="The API keys of tenants.", no_args_is_help=True)


def size_option(text: str) -> int:
    """Parses an option such as `2GiB`."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """The command, its errors as one line and exit code 2."""

    @wraps(command)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except PersonaeError as error:
            typer.secho(f"error: {error.message}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from None

    return guarded


@contextmanager
def _store(data_dir: Path, *, new: bool = False) -> Iterator["TenantStore"]:
    """The tenants of a directory, which may be `new`."""
    from personae.api.tenants.data import DATABASE, DataDir
    from personae.api.tenants.store import TenantStore

    if not new and not (data_dir / DATABASE).exists():
        raise LoadError(
            f"{data_dir} is no data directory; `personae tenants create NAME --data-dir DIR` makes one."
        )
    data = DataDir(data_dir)
    try:
        yield TenantStore(data)
    finally:
        data.close()


def _date(time: int | None) -> str:
    return "" if time is None else datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M")


@tenants_app.command("create")
@reporting
def create_tenant(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, - and _.")],
    data_dir: DataDirOption,
    requests_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Requests per minute; 30,000 unless given.")
    ] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=0, help="Tokens of prompts and answers per minute.")
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(min=0, help="Requests at the same time; 1,024 unless given.")
    ] = None,
    adapters: Annotated[int | None, typer.Option(min=0, help="Adapters at the same time.")] = None,
    adapter_bytes: Annotated[
        int | None,
        typer.Option(parser=size_option, metavar="SIZE", help="Bytes of all its adapters, such as 2GiB."),
    ] = None,
    file_bytes: Annotated[
        int | None,
        typer.Option(parser=size_option, metavar="SIZE", help="Bytes of all its batch files, such as 2GiB."),
    ] = None,
    schemas_per_minute: Annotated[int | None, typer.Option(min=0, help="New schemas per minute.")] = None,
    weight: Annotated[
        float | None, typer.Option(min=0.01, max=100, help="Its share of the service; 1 unless given.")
    ] = None,
    body_bytes: Annotated[
        int | None,
        typer.Option(
            parser=size_option,
            metavar="SIZE",
            help="Bytes of request bodies that are being taken in at the same time; 64MiB unless given.",
        ),
    ] = None,
) -> None:
    """Add a tenant. A limit that is not given is the server's default, or none."""
    from personae.api.tenants.store import Limits

    limits = Limits(
        requests_per_minute,
        tokens_per_minute,
        concurrent,
        adapters,
        adapter_bytes,
        file_bytes,
        schemas_per_minute,
        weight,
        body_bytes,
    )
    new = not data_dir.exists()
    with _store(data_dir, new=True) as store:
        store.create_tenant(name, limits)
    typer.echo(f"tenant {name} created" + (f", and the data directory {data_dir}" if new else ""))


@tenants_app.command("list")
@reporting
def list_tenants(data_dir: DataDirOption) -> None:
    """Show all tenants and their limits."""
    import msgspec

    with _store(data_dir) as store:
        for tenant in store.list_tenants():
            limits = " ".join(
                f"{_OPTIONS.get(key, key)}={value}"
                for key, value in msgspec.to_builtins(tenant.limits).items()
            )
            revoked = f"revoked {_date(tenant.revoked)}" if tenant.revoked else ""
            parts = (tenant.name, _date(tenant.created), limits, revoked)
            typer.echo("  ".join(part for part in parts if part))


@tenants_app.command("revoke")
@reporting
def revoke_tenant(name: str, data_dir: DataDirOption) -> None:
    """Revoke all keys of a tenant for ever. Its name stays taken."""
    with _store(data_dir) as store:
        store.revoke_tenant(name)
    typer.echo(f"tenant {name} revoked")


@keys_app.command("create")
@reporting
def create_key(
    tenant: str,
    data_dir: DataDirOption,
    admin: Annotated[
        bool, typer.Option("--admin", help="An admin's key, for what concerns all tenants.")
    ] = False,
) -> None:
    """Make a key for a tenant and print it. It cannot be shown again."""
    with _store(data_dir) as store:
        typer.echo(store.create_key(tenant, "admin" if admin else "tenant"))


@keys_app.command("list")
@reporting
def list_keys(data_dir: DataDirOption) -> None:
    """Show all keys, without their secrets."""
    with _store(data_dir) as store:
        for key in store.list_keys():
            revoked = f"revoked {_date(key.revoked)}" if key.revoked else ""
            parts = (key.id, key.tenant, key.role, _date(key.created), revoked)
            typer.echo("  ".join(part for part in parts if part))


@keys_app.command("revoke")
@reporting
def revoke_key(
    id: Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")], data_dir: DataDirOption
) -> None:
    """Revoke a key."""
    with _store(data_dir) as store:
        store.revoke_key(id)
    typer.echo("key revoked")
