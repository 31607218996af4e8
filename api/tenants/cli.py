"""`personae tenants` and `personae keys`: they work on the data directory, also while a server runs on it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from personae.actors.options import parse_size
from personae.api.commands.command_line import option_parser
from personae.errors import LoadError, PersonaeError, StorageFailed

if TYPE_CHECKING:
    from personae.api.tenants.store import TenantStore

P = ParamSpec("P")

_OPTIONS = {"bytes": "adapter_bytes"}  # limits that another name asks for

DataDirOption = Annotated[Path, typer.Option("--data-dir", metavar="DIR", help="The server's --data-dir.")]

tenants_app = typer.Typer(help="Who may use the server, and how much.", no_args_is_help=True)
keys_app = typer.Typer(help="The API keys of tenants.", no_args_is_help=True)


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
def _revoking(what: str) -> Iterator[None]:
    """Say of a revocation that failed what is valid still."""
    try:
        yield
    except (LoadError, StorageFailed) as error:
        raise LoadError(
            f"{what} was NOT revoked and still works: {error.message} "
            "Free some space on the disk of --data-dir, then run this command again."
        ) from None


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


def _limit(help: str, **options: Any) -> Any:
    return typer.Option(help=help, **options)


RequestsPerMinute = Annotated[int | None, _limit("Requests per minute; 30000 unless given.", min=0)]
TokensPerMinute = Annotated[int | None, _limit("Tokens of prompts and answers per minute.", min=0)]
Concurrent = Annotated[int | None, _limit("Requests at the same time; 1024 unless given.", min=0)]
Adapters = Annotated[int | None, _limit("Adapters at the same time; 256 unless given.", min=0)]
AdapterBytes = Annotated[
    int | None,
    _limit(
        "What its adapters may take on the disk; 8GiB unless given.",
        parser=option_parser(parse_size),
        metavar="SIZE",
    ),
]
Files = Annotated[int | None, _limit("Files at the same time; 10000 unless given.", min=0)]
FileBytes = Annotated[
    int | None,
    _limit(
        "Bytes of all its files, results of batches included; 8GiB unless given.",
        parser=option_parser(parse_size),
        metavar="SIZE",
    ),
]
OpenBatches = Annotated[int | None, _limit("Batches that are not done; 100 unless given.", min=0)]
SchemasPerMinute = Annotated[
    int | None, _limit("New schemas and grammars per minute; 600 unless given.", min=0)
]
BodyBytes = Annotated[
    int | None,
    _limit(
        "Bytes of request bodies that are received at the same time; 64MiB unless given.",
        parser=option_parser(parse_size),
        metavar="SIZE",
    ),
]
Weight = Annotated[float | None, _limit("Its share of the service; 1 unless given.", min=0.01, max=100)]


@tenants_app.command("create")
@reporting
def create_tenant(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, - and _.")],
    data_dir: DataDirOption,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    concurrent: Concurrent = None,
    adapters: Adapters = None,
    adapter_bytes: AdapterBytes = None,
    files: Files = None,
    file_bytes: FileBytes = None,
    batches: OpenBatches = None,
    schemas_per_minute: SchemasPerMinute = None,
    weight: Weight = None,
    body_bytes: BodyBytes = None,
) -> None:
    """Add a tenant. Limits without a default are off unless given; defaults do not hold for admins' keys."""
    from personae.api.tenants.store import TenantLimits

    limits = TenantLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent=concurrent,
        adapters=adapters,
        bytes=adapter_bytes,
        files=files,
        file_bytes=file_bytes,
        batches=batches,
        schemas_per_minute=schemas_per_minute,
        weight=weight,
        body_bytes=body_bytes,
    )
    new = not data_dir.exists()
    with _store(data_dir, new=True) as store:
        store.create_tenant(name, limits)
    typer.echo(f"tenant {name} created" + (f", and the data directory {data_dir}" if new else ""))


@tenants_app.command("limit")
@reporting
def limit_tenant(
    name: str,
    data_dir: DataDirOption,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    concurrent: Concurrent = None,
    adapters: Adapters = None,
    adapter_bytes: AdapterBytes = None,
    files: Files = None,
    file_bytes: FileBytes = None,
    batches: OpenBatches = None,
    schemas_per_minute: SchemasPerMinute = None,
    weight: Weight = None,
    body_bytes: BodyBytes = None,
) -> None:
    """Change limits of a tenant, also while a server runs. Those that are not given stay as they are."""
    from personae.api.tenants.store import TenantLimits

    limits = TenantLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent=concurrent,
        adapters=adapters,
        bytes=adapter_bytes,
        files=files,
        file_bytes=file_bytes,
        batches=batches,
        schemas_per_minute=schemas_per_minute,
        weight=weight,
        body_bytes=body_bytes,
    )
    with _store(data_dir) as store:
        store.change_limits(name, limits)
    typer.echo(f"limits of tenant {name} changed")


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
    with _revoking(f"Tenant {name}"), _store(data_dir) as store:
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
    """Revoke a key. On a full disk this works, too."""
    with _revoking("The key"), _store(data_dir) as store:
        store.revoke_key(id)
    typer.echo("key revoked")
