"""`personae tenants`, `keys` and `usage`: they ask a running server, or work on the records themselves, on a
data directory or a database, with or without a server that runs on it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from personae.actors.options import OptionInfo, parse_size
from personae.api.commands.command_line import JsonOption, expand_options, reporting
from personae.api.commands.remote import URL, server
from personae.api.commands.table import date, show, show_json
from personae.errors import LoadError, Overloaded, RequestError

if TYPE_CHECKING:
    from personae.api.tenants.data import DataDir
    from personae.api.tenants.remote import RemoteRecords
    from personae.api.tenants.store import TenantLimits, TenantStore
    from personae.api.tenants.usage import UsageLedger

    Administered = TenantStore | RemoteRecords
    Counted = UsageLedger | RemoteRecords

_OPTIONS = {"bytes": "adapter_bytes"}  # limits with another name on the command line


def _moment(text: str) -> int:
    """A time on the command line: days from now (`30d`), or a date in UTC."""
    try:
        if text.endswith("d"):
            return int((datetime.now(UTC) + timedelta(days=int(text[:-1]))).timestamp())
        when = datetime.fromisoformat(text)
        return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is beyond the year 9999.") from None
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither days, as 30d, nor a date, as 2027-01-31.") from None


ExpiresOption = Annotated[
    int | None,
    typer.Option(parser=_moment, metavar="WHEN", help="Until when it is valid: 30d, or a date in UTC."),
]

tenants_app = typer.Typer(help="Who may use the server, and how much.", no_args_is_help=True)
keys_app = typer.Typer(help="The API keys of tenants.", no_args_is_help=True)


@contextmanager
def _revoking(what: str) -> Iterator[None]:
    """If a revocation fails, say what is still valid."""
    try:
        yield
    except (LoadError, Overloaded) as error:
        raise type(error)(
            f"{what} was NOT revoked and still works: {error.message} "
            "Run this command again when there is space on the disk, and the server or the database answers."
        ) from None


@dataclass(frozen=True, kw_only=True)
class RecordsOptions:
    """Where the records are. A data directory or a database is opened; without them a server is asked."""

    url: Annotated[str | None, OptionInfo("Where the server runs.", unset=URL)] = None
    key: Annotated[
        str | None, OptionInfo("An admin's key. Better given as PERSONAE_API_KEY.", env="PERSONAE_API_KEY")
    ] = None
    data_dir: Annotated[
        Path | None,
        OptionInfo(
            "Work on the records in a server's --data-dir instead; no server needs to run.", metavar="DIR"
        ),
    ] = None
    database_url: Annotated[
        str | None,
        OptionInfo(
            "Work on the records in a server's --database-url instead.",
            metavar="URL",
            env="PERSONAE_DATABASE_URL",
        ),
    ] = None

    @contextmanager
    def opened(self, *, new: bool = False) -> Iterator[tuple["Administered", "Counted"]]:
        """The tenants and the usage. A data directory may be `new`."""
        from personae.api.tenants.store import TenantStore
        from personae.api.tenants.usage import UsageLedger

        if self.data_dir is None and self.database_url is None:
            from personae.api.tenants.remote import RemoteRecords

            with server(self.url or URL, self.key) as client:
                remote = RemoteRecords(client)
                yield remote, remote
        elif self.url is not None:
            raise RequestError(
                "--url names a running server, but --data-dir, --database-url or PERSONAE_DATABASE_URL the "
                "records themselves: give one of them.",
                param="url",
            )
        else:
            with self._data(new=new) as data:
                yield TenantStore(data), UsageLedger(data)

    @contextmanager
    def records(self) -> Iterator["TenantStore"]:
        """The tenants of a data directory, which may be new, or of a database. Raises RequestError if neither
        is given."""
        from personae.api.tenants.store import TenantStore

        if self.data_dir is None and self.database_url is None:
            raise RequestError(
                "`tenants import` adds all tenants or none, which no route does: give --data-dir "
                "or --database-url.",
                param="data_dir",
            )
        with self._data(new=True) as data:
            yield TenantStore(data)

    @contextmanager
    def _data(self, *, new: bool) -> Iterator["DataDir"]:
        from personae.api.database.schema import check_database_url
        from personae.api.tenants.data import DATABASE, DataDir

        with ExitStack() as opened:
            folder = self.data_dir
            if self.database_url is not None:
                try:
                    check_database_url(self.database_url)
                except ValueError as error:
                    raise LoadError(f"--database-url: {error}") from None
                folder = folder or Path(opened.enter_context(TemporaryDirectory(prefix="personae-")))
                data = DataDir(folder, self.database_url, follow=False)
            else:
                assert folder is not None
                if not new and not (folder / DATABASE).exists():
                    raise LoadError(
                        f"{folder} is no data directory; `personae tenants create NAME --data-dir DIR` makes "
                        "one."
                    )
                data = DataDir(folder)
            opened.callback(data.close)
            yield data


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
    where: RecordsOptions,
    options: LimitOptions,
) -> None:
    """Add a tenant. Limits without a default are off unless given. Defaults do not apply to admins' keys."""
    new = where.data_dir is not None and not where.data_dir.exists()
    with where.opened(new=True) as (tenants, _):
        tenants.create_tenant(name, options.limits())
    typer.echo(f"tenant {name} created" + (f", and the data directory {where.data_dir}" if new else ""))


@tenants_app.command("limit")
@reporting
@expand_options
def limit_tenant(
    name: str,
    where: RecordsOptions,
    options: LimitOptions,
) -> None:
    """Change limits of a tenant, also while a server runs. Limits that are not given stay as they are."""
    with where.opened() as (tenants, _):
        tenants.change_limits(name, options.limits())
    typer.echo(f"limits of tenant {name} changed")


@tenants_app.command("list")
@reporting
@expand_options
def list_tenants(where: RecordsOptions, json: JsonOption = False) -> None:
    """Show all tenants and their limits."""
    import msgspec

    with where.opened() as (store, _):
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
@expand_options
def import_tenants(
    file: Annotated[Path, typer.Argument(help='Lines of JSON: {"name": …, "limits": {…}}.')],
    where: RecordsOptions,
    keys: Annotated[bool, typer.Option("--keys", help="Make a key for each, too, and print them.")] = False,
) -> None:
    """Add all tenants of a file, or none. With --keys the output is lines of JSON with name and key."""
    import msgspec

    from personae.api.tenants.store import ImportedTenant, TenantLimits

    try:
        found = msgspec.json.Decoder(ImportedTenant, strict=True).decode_lines(file.read_bytes())
    except OSError as error:
        raise RequestError(f"{file}: {error.strerror}.", param="file") from None
    except msgspec.MsgspecError as error:
        raise RequestError(f"{file}: {error}.", param="file") from None
    with where.records() as tenants:
        made = tenants.create_many(
            [(each.name, TenantLimits(**each.limits.named())) for each in found], keys=keys
        )
    for each, key in zip(found, made, strict=False):
        typer.echo(msgspec.json.encode({"name": each.name, "key": key}).decode())
    typer.echo(f"{len(found)} tenants created", err=keys)


@tenants_app.command("free")
@reporting
@expand_options
def free_tenant(name: str, where: RecordsOptions) -> None:
    """Remove a revoked tenant with all its data, so that its name can be used again. Its usage is kept as
    NAME~TIME."""
    with where.opened() as (tenants, _):
        tenants.free_tenant(name)
    typer.echo(f"tenant {name} freed")


@tenants_app.command("revoke")
@reporting
@expand_options
def revoke_tenant(name: str, where: RecordsOptions) -> None:
    """Revoke all keys of a tenant permanently. Its name stays taken until it is freed."""
    with _revoking(f"Tenant {name}"), where.opened() as (tenants, _):
        tenants.revoke_tenant(name)
    typer.echo(f"tenant {name} revoked")


@keys_app.command("create")
@reporting
@expand_options
def create_key(
    tenant: str,
    where: RecordsOptions,
    admin: Annotated[
        bool, typer.Option("--admin", help="An admin's key, for what concerns all tenants.")
    ] = False,
    label: Annotated[str, typer.Option(help="What the key is for.")] = "",
    expires: ExpiresOption = None,
) -> None:
    """Make a key for a tenant and print it. It cannot be shown again."""
    with where.opened() as (tenants, _):
        typer.echo(tenants.create_key(tenant, "admin" if admin else "tenant", label=label, expires=expires))


@keys_app.command("list")
@reporting
@expand_options
def list_keys(
    where: RecordsOptions,
    tenant: Annotated[str | None, typer.Option(help="Those of one tenant.")] = None,
    json: JsonOption = False,
) -> None:
    """Show all keys, without their secrets."""
    with where.opened() as (tenants, _):
        keys = tenants.list_keys(tenant)
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
@expand_options
def change_key(
    id: str,
    where: RecordsOptions,
    label: Annotated[str | None, typer.Option(help="What the key is for.")] = None,
    expires: ExpiresOption = None,
) -> None:
    """Change a key's label or expiry, also while a server runs. What is not given stays as it is."""
    given = {"label": label, "expires": expires}
    with where.opened() as (tenants, _):
        tenants.change_key(id, {name: value for name, value in given.items() if value is not None})
    typer.echo("key changed")


@keys_app.command("rotate")
@reporting
@expand_options
def rotate_key(
    id: str,
    where: RecordsOptions,
    overlap: Annotated[
        int, typer.Option(help="Seconds for which the old key stays valid.", min=0, max=30 * 86400)
    ] = 0,
) -> None:
    """Replace a key by a new one like it, and print the new one."""
    with where.opened() as (tenants, _):
        typer.echo(tenants.rotate_key(id, overlap))


@keys_app.command("revoke")
@reporting
@expand_options
def revoke_key(
    id: Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")], where: RecordsOptions
) -> None:
    """Revoke a key. This also works on a full disk."""
    with _revoking("The key"), where.opened() as (tenants, _):
        tenants.revoke_key(id)
    typer.echo("key revoked")


usage_app = typer.Typer()


@usage_app.command("usage")
@reporting
@expand_options
def show_usage(
    where: RecordsOptions,
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
    from personae.api.tenants.usage import NUMBERS, as_csv, cell, columns_of

    columns = columns_of(by)
    with where.opened() as (_, usage):
        rows, more = usage.rows(columns, tenant=tenant, begin=begin, end=end)
    if json:
        show_json(rows)
    elif csv:
        typer.echo(as_csv(rows, columns), nl=False)
    else:
        names = (*columns, *NUMBERS)
        found = [[getattr(row, name) for name in names] for row in rows]
        show(
            [
                [date(v) if n in ("hour", "last_hour") else cell(v) for n, v in zip(names, row, strict=True)]
                for row in found
            ],
            names,
        )
    if more:
        typer.echo("There is more: name fewer columns or fewer hours.", err=True)
