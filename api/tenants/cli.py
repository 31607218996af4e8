"""`personae tenants` and `personae keys`: they work on a data directory or a database, also while servers run
on it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, ParamSpec

import typer

from personae.actors.options import OptionInfo, parse_size
from personae.api.commands.command_line import expand_options
from personae.api.commands.table import date, show, show_json
from personae.errors import LoadError, PersonaeError, RequestError, StorageFailed

if TYPE_CHECKING:
    from personae.api.tenants.data import DataDir
    from personae.api.tenants.store import TenantLimits, TenantStore

P = ParamSpec("P")

_OPTIONS = {"bytes": "adapter_bytes"}  # limits with another name on the command line

DataDirOption = Annotated[
    str,
    typer.Option(
        "--data-dir",
        "--database-url",
        metavar="DIR|URL",
        envvar="PERSONAE_DATABASE_URL",
        help="The server's --data-dir, or its --database-url.",
    ),
]
"""Where the records are: a folder, or the URL of a PostgreSQL database."""

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _moment(text: str) -> int:
    """A time on the command line: days from now (`30d`), or a date in UTC."""
    try:
        if text.endswith("d"):
            return int((datetime.now(UTC) + timedelta(days=int(text[:-1]))).timestamp())
        when = datetime.fromisoformat(text)
        return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is neither days, as 30d, nor a date, as 2027-01-31.") from None


ExpiresOption = Annotated[
    int | None,
    typer.Option(parser=_moment, metavar="WHEN", help="Until when it is valid: 30d, or a date in UTC."),
]

tenants_app = typer.Typer(help="Who may use the server, and how much.", no_args_is_help=True)
keys_app = typer.Typer(help="The API keys of tenants.", no_args_is_help=True)


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with its errors as one line and exit code 2."""

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
    """If a revocation fails, say what is still valid."""
    try:
        yield
    except (LoadError, StorageFailed) as error:
        raise LoadError(
            f"{what} was NOT revoked and still works: {error.message} "
            "Run this command again when there is space on the disk, or the database answers."
        ) from None


@contextmanager
def _opened(place: str, *, new: bool = False) -> Iterator["DataDir"]:
    """The records of a directory, which may be `new`, or of a database."""
    from personae.api.database.schema import check_database_url
    from personae.api.tenants.data import DATABASE, DataDir

    with ExitStack() as opened:
        if "://" in place:
            try:
                check_database_url(place)
            except ValueError as error:
                raise LoadError(f"--database-url: {error}") from None
            folder = opened.enter_context(TemporaryDirectory(prefix="personae-"))
            data = DataDir(Path(folder), place, follow=False)
        else:
            if not new and not (Path(place) / DATABASE).exists():
                raise LoadError(
                    f"{place} is no data directory; `personae tenants create NAME --data-dir DIR` makes one."
                )
            data = DataDir(Path(place))
        opened.callback(data.close)
        yield data


@contextmanager
def _store(place: str, *, new: bool = False) -> Iterator["TenantStore"]:
    """The tenants of a directory, which may be `new`, or of a database."""
    from personae.api.tenants.store import TenantStore

    with _opened(place, new=new) as data:
        yield TenantStore(data)


_FILE_BYTES = "Bytes of all its files, results of batches included."
_RESPONSE_BYTES = "Bytes of stored responses, the oldest of which are forgotten."
_BODY_BYTES = "Bytes of request bodies that are received at the same time."


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """Limits of a tenant."""

    requests_per_minute: Annotated[int | None, OptionInfo("Requests per minute.", min=0, unset="30000")] = (
        None
    )
    tokens_per_minute: Annotated[
        int | None, OptionInfo("Tokens of prompts and answers per minute.", min=0)
    ] = None
    concurrent: Annotated[int | None, OptionInfo("Requests at the same time.", min=0, unset="1024")] = None
    adapters: Annotated[int | None, OptionInfo("Adapters at the same time.", min=0, unset="256")] = None
    adapter_bytes: Annotated[
        int | None,
        OptionInfo("What its adapters may take on the disk.", parse=parse_size, metavar="SIZE", unset="8GiB"),
    ] = None
    files: Annotated[int | None, OptionInfo("Files at the same time.", min=0, unset="10000")] = None
    file_bytes: Annotated[
        int | None, OptionInfo(_FILE_BYTES, parse=parse_size, metavar="SIZE", unset="8GiB")
    ] = None
    batches: Annotated[int | None, OptionInfo("Batches that are not done.", min=0, unset="100")] = None
    schemas_per_minute: Annotated[
        int | None, OptionInfo("New schemas and grammars per minute.", min=0, unset="600")
    ] = None
    weight: Annotated[float | None, OptionInfo("Its share of the service.", min=0.01, max=100, unset="1")] = (
        None
    )
    body_bytes: Annotated[
        int | None, OptionInfo(_BODY_BYTES, parse=parse_size, metavar="SIZE", unset="64MiB")
    ] = None
    response_bytes: Annotated[
        int | None, OptionInfo(_RESPONSE_BYTES, parse=parse_size, metavar="SIZE", unset="256MiB")
    ] = None

    tokens_per_day: Annotated[
        int | None, OptionInfo("Tokens of prompts and answers in a day, in UTC.", min=0)
    ] = None
    spend_per_day: Annotated[
        float | None, OptionInfo("What it may spend in a day, by the server's --price.", min=0)
    ] = None
    fetches_per_minute: Annotated[
        int | None,
        OptionInfo(
            "Adapters per minute that its requests may have fetched, by sources that they name as `model`.",
            min=0,
            unset="the server's",
        ),
    ] = None

    def limits(self) -> "TenantLimits":
        """The limits; those that are not given are None."""
        from personae.api.tenants.store import TenantLimits

        given = asdict(self)
        return TenantLimits(bytes=given.pop("adapter_bytes"), **given)


@tenants_app.command("create")
@reporting
@expand_options
def create_tenant(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, - and _.")],
    data_dir: DataDirOption,
    options: LimitOptions,
) -> None:
    """Add a tenant. Limits without a default are off unless given. Defaults do not apply to admins' keys."""
    new = "://" not in data_dir and not Path(data_dir).exists()
    with _store(data_dir, new=True) as store:
        store.create_tenant(name, options.limits())
    typer.echo(f"tenant {name} created" + (f", and the data directory {data_dir}" if new else ""))


@tenants_app.command("limit")
@reporting
@expand_options
def limit_tenant(
    name: str,
    data_dir: DataDirOption,
    options: LimitOptions,
) -> None:
    """Change limits of a tenant, also while a server runs. Limits that are not given stay as they are."""
    with _store(data_dir) as store:
        store.change_limits(name, options.limits())
    typer.echo(f"limits of tenant {name} changed")


@tenants_app.command("list")
@reporting
def list_tenants(data_dir: DataDirOption, json: JsonOption = False) -> None:
    """Show all tenants and their limits."""
    import msgspec

    with _store(data_dir) as store:
        tenants = store.list_tenants()
    if json:
        show_json(tenants)
        return
    rows = []
    for tenant in tenants:
        given = msgspec.to_builtins(tenant.limits).items()
        limits = " ".join(f"{_OPTIONS.get(key, key)}={value}" for key, value in given)
        rows.append((tenant.name, date(tenant.created), date(tenant.revoked), limits))
    show(rows, ("name", "created", "revoked", "limits"))


@tenants_app.command("import")
@reporting
def import_tenants(
    file: Annotated[Path, typer.Argument(help='Lines of JSON: {"name": …, "limits": {…}}.')],
    data_dir: DataDirOption,
    keys: Annotated[bool, typer.Option("--keys", help="Make a key for each, too, and print them.")] = False,
) -> None:
    """Add all tenants of a file, or none. With --keys the output is lines of JSON with name and key."""
    import msgspec

    from personae.api.tenants.store import ImportedTenant, TenantLimits

    try:
        found = msgspec.json.Decoder(ImportedTenant, strict=True).decode_lines(file.read_bytes())
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}.") from None
    except msgspec.MsgspecError as error:
        raise RequestError(f"{file}: {error}.") from None
    with _store(data_dir, new=True) as store:
        made = store.create_many(
            [(each.name, TenantLimits(**each.limits.named())) for each in found], keys=keys
        )
    for each, key in zip(found, made, strict=False):
        typer.echo(msgspec.json.encode({"name": each.name, "key": key}).decode())
    typer.echo(f"{len(found)} tenants created", err=keys)


@tenants_app.command("free")
@reporting
def free_tenant(name: str, data_dir: DataDirOption) -> None:
    """Remove a revoked tenant with all its data, so that its name can be used again. Its usage is kept as
    NAME~TIME."""
    with _store(data_dir) as store:
        store.free_tenant(name)
    typer.echo(f"tenant {name} freed")


@tenants_app.command("revoke")
@reporting
def revoke_tenant(name: str, data_dir: DataDirOption) -> None:
    """Revoke all keys of a tenant permanently. Its name stays taken until it is freed."""
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
    label: Annotated[str, typer.Option(help="What the key is for.")] = "",
    expires: ExpiresOption = None,
) -> None:
    """Make a key for a tenant and print it. It cannot be shown again."""
    with _store(data_dir) as store:
        typer.echo(store.create_key(tenant, "admin" if admin else "tenant", label=label, expires=expires))


@keys_app.command("list")
@reporting
def list_keys(
    data_dir: DataDirOption,
    tenant: Annotated[str | None, typer.Option(help="Those of one tenant.")] = None,
    json: JsonOption = False,
) -> None:
    """Show all keys, without their secrets."""
    with _store(data_dir) as store:
        keys = store.list_keys(tenant)
    if json:
        show_json(keys)
        return
    rows = [
        (
            key.id,
            key.tenant,
            key.role,
            key.label,
            *map(date, (key.created, key.expires, key.used, key.revoked)),
        )
        for key in keys
    ]
    show(rows, ("id", "tenant", "role", "label", "created", "expires", "used", "revoked"))


@keys_app.command("change")
@reporting
def change_key(
    id: str,
    data_dir: DataDirOption,
    label: Annotated[str | None, typer.Option(help="What the key is for.")] = None,
    expires: ExpiresOption = None,
) -> None:
    """Change a key's label or expiry, also while a server runs. What is not given stays as it is."""
    given = {"label": label, "expires": expires}
    with _store(data_dir) as store:
        store.change_key(id, {name: value for name, value in given.items() if value is not None})
    typer.echo("key changed")


@keys_app.command("rotate")
@reporting
def rotate_key(
    id: str,
    data_dir: DataDirOption,
    overlap: Annotated[
        int, typer.Option(help="Seconds for which the old key stays valid.", min=0, max=30 * 86400)
    ] = 0,
) -> None:
    """Replace a key by a new one like it, and print the new one."""
    with _store(data_dir) as store:
        typer.echo(store.rotate_key(id, overlap))


@keys_app.command("revoke")
@reporting
def revoke_key(
    id: Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")], data_dir: DataDirOption
) -> None:
    """Revoke a key. This also works on a full disk."""
    with _revoking("The key"), _store(data_dir) as store:
        store.revoke_key(id)
    typer.echo("key revoked")


usage_app = typer.Typer()


@usage_app.command("usage")
@reporting
def show_usage(
    data_dir: DataDirOption,
    by: Annotated[str, typer.Option(help="Some of hour, tenant, key, adapter.")] = "tenant,adapter",
    tenant: Annotated[str | None, typer.Option(help="Of one tenant.")] = None,
    begin: Annotated[
        int | None, typer.Option("--from", parser=_moment, metavar="DATE", help="From this date on, in UTC.")
    ] = None,
    end: Annotated[
        int | None, typer.Option("--to", parser=_moment, metavar="DATE", help="Before this date, in UTC.")
    ] = None,
    json: JsonOption = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
) -> None:
    """Show requests, tokens and seconds of adapters. A running server writes it every ten seconds."""
    from personae.api.tenants.usage import NUMBERS, UsageLedger, as_csv, columns_of

    columns = columns_of(by)
    with _opened(data_dir) as data:
        rows, more = UsageLedger(data).rows(columns, tenant=tenant, begin=begin, end=end)
    if json:
        show_json(rows)
    elif csv:
        typer.echo(as_csv(rows, columns), nl=False)
    else:
        names = (*columns, *NUMBERS)
        found = [[getattr(row, name) for name in names] for row in rows]
        show(
            [
                [date(v) if n in ("hour", "last_hour") else v for n, v in zip(names, row, strict=True)]
                for row in found
            ],
            names,
        )
    if more:
        typer.echo("There is more: name fewer columns or fewer hours.", err=True)
