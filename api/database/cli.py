"""`personae database`: work on the database of the server's records."""

from pathlib import Path
from typing import Annotated

import typer

from personae.api.commands.command_line import reporting
from personae.api.commands.table import show
from personae.errors import LoadError

database_app = typer.Typer(help="Where the server's records are.", no_args_is_help=True)


@database_app.callback()
def _database() -> None:
    """Where the server's records are."""


@database_app.command("migrate")
@reporting
def migrate_database(
    data_dir: Annotated[Path, typer.Option(help="The --data-dir of a server that is stopped.")],
    database_url: Annotated[
        str, typer.Option(envvar="PERSONAE_DATABASE_URL", help="An empty PostgreSQL database.", metavar="URL")
    ],
    object_store: Annotated[
        str | None,
        typer.Option(
            help="Where to put the contents of adapters and files, as `serve` takes it.", metavar="URL"
        ),
    ] = None,
) -> None:
    """Move the records of a data directory to PostgreSQL: all of them, or none if anything fails."""
    from personae.api.database.migration import MIGRATED, migrate
    from personae.api.database.schema import check_database_url
    from personae.api.object_store import ObjectStore
    from personae.engine.object_stores import check_store_url

    try:
        url = check_database_url(database_url)
        objects = None if object_store is None else ObjectStore(check_store_url(object_store))
    except ValueError as error:
        raise LoadError(str(error)) from None
    done = migrate(data_dir, url, objects)
    show([(table, count) for table, count in done.rows.items() if count], ("table", "rows"))
    for name in done.missing:
        typer.echo(f"warning: {data_dir} has no content of {name}", err=True)
    if objects is None:
        typer.echo(f"The contents of adapters and files are still in {data_dir}: give it to one server.")
    else:
        typer.echo(f"{done.contents} adapters and files are in the object store.")
    typer.echo(f"{data_dir / MIGRATED} is the old database. Start servers with --database-url from now on.")
