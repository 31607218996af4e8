"""The tables, in SQLite's words and in PostgreSQL's."""

import re

MIRRORED = {
    "meta": "key",
    "tenants": "name",
    "keys": "id",
    "adapters": "id",
    "adapter_versions": "id",
    "adapter_settings": "id",
    "adapter_aliases": "id",
    "files": "id",
    "batches": "id",
}
"""The small tables, and the column that names a row. A server with PostgreSQL has a copy of them."""

_NUMBERED = ("keys", "files", "batches", "responses")  # their rows have an order: that of their creation

SQLITE = """
create table if not exists meta (key text primary key, value blob not null) strict;
create table if not exists tenants (
    name text primary key,
    created integer not null,
    revoked integer,
    limits text not null
) strict;
create table if not exists keys (
    id text primary key,
    tenant text not null references tenants (name),
    role text not null check (role in ('admin', 'tenant')),
    digest blob not null,
    created integer not null,
    revoked integer,
    label text not null default '',
    expires integer,
    used integer
) strict;
create table if not exists usage (
    hour integer not null,
    tenant text not null,
    key text not null,
    adapter text not null,
    requests integer not null,
    prompt integer not null,
    cached integer not null,
    completion integer not null,
    seconds real not null default 0,
    spend real not null default 0,
    primary key (hour, tenant, key, adapter)
) strict;
create table if not exists sessions (
    tenant text not null,
    id blob not null,
    created integer not null,
    used integer not null,
    expires integer not null,
    ttl integer not null,
    requests integer not null,
    prompt integer not null,
    cached integer not null,
    completion integer not null,
    primary key (tenant, id)
) strict;
create index if not exists sessions_by_time on sessions (expires);
create table if not exists responses (
    id text primary key,
    tenant text not null,
    created integer not null,
    previous text,
    bytes integer not null,
    input blob not null,
    response blob not null,
    request blob
) strict;
create table if not exists conversations (
    id text primary key,
    tenant text not null,
    created integer not null,
    metadata text not null,
    bytes integer not null
) strict;
create index if not exists conversations_by_tenant on conversations (tenant);
create table if not exists conversation_items (
    place integer primary key,
    conversation text not null references conversations (id) on delete cascade,
    id text not null,
    bytes integer not null,
    item blob not null,
    unique (conversation, id)
) strict;
create index if not exists items_by_conversation on conversation_items (conversation, bytes);
create index if not exists responses_by_tenant on responses (tenant, bytes);
create index if not exists responses_by_time on responses (created);
create index if not exists keys_by_tenant on keys (tenant);
create table if not exists adapters (
    tenant text not null,
    name text not null,
    id text not null unique,
    version integer not null,
    digest text not null,
    ranks text not null,
    bytes integer not null,
    shared integer not null,
    created integer not null,
    traits text not null default '{}',
    source text not null default '',
    defaults text not null default '{}',
    base text not null default '',
    primary key (tenant, name)
) strict;
create index if not exists adapters_by_digest on adapters (digest);
create index if not exists adapters_by_name on adapters (name);
create table if not exists adapter_versions (
    tenant text not null,
    name text not null,
    id text not null unique,
    version integer not null,
    digest text not null,
    ranks text not null,
    bytes integer not null,
    shared integer not null,
    created integer not null,
    traits text not null default '{}',
    source text not null default '',
    defaults text not null default '{}',
    base text not null default '',
    primary key (tenant, name, version)
) strict;
create index if not exists adapter_versions_by_digest on adapter_versions (digest);
create table if not exists adapter_settings (
    tenant text not null,
    name text not null,
    id text not null unique,
    newest integer not null,
    pinned integer not null,
    keep_loaded integer not null default 0,
    primary key (tenant, name)
) strict;
create table if not exists adapter_aliases (
    tenant text not null,
    name text not null,
    id text not null unique,
    targets text not null,
    shared integer not null,
    created integer not null,
    primary key (tenant, name)
) strict;
create index if not exists adapter_aliases_by_name on adapter_aliases (name);
create table if not exists files (
    id text primary key,
    tenant text not null,
    filename text not null,
    purpose text not null,
    bytes integer not null,
    created integer not null,
    expires integer
) strict;
create index if not exists files_by_tenant on files (tenant);
create table if not exists batches (
    id text primary key,
    tenant text not null,
    status text not null,
    entry text not null
) strict;
create index if not exists batches_by_tenant on batches (tenant);
create index if not exists batches_by_status on batches (status);
"""

TABLES = tuple(re.findall(r"create table if not exists (\w+)", SQLITE))
"""All tables, those that others refer to first."""

LATER_COLUMNS = (
    ("adapters", "traits", "text not null default '{}'"),
    *(
        (table, column, f"text not null default '{default}'")
        for table in ("adapters", "adapter_versions")
        for column, default in (("source", ""), ("defaults", "{}"), ("base", ""))
    ),
    ("adapter_settings", "keep_loaded", "integer not null default 0"),
    ("keys", "label", "text not null default ''"),
    ("keys", "expires", "integer"),
    ("keys", "used", "integer"),
    ("usage", "seconds", "real not null default 0"),
    ("usage", "spend", "real not null default 0"),
    ("responses", "request", "blob"),
)
"""Columns that the records of an earlier version lack."""

_SHARED = """
create table if not exists servers (id text primary key, until timestamptz not null);
create table if not exists owners (item text primary key, server text not null);
create table if not exists batch_results (
    place bigint generated always as identity primary key,
    batch text not null,
    custom_id text not null,
    file text not null,
    line bytea not null,
    unique (batch, custom_id)
);
create index if not exists batch_results_by_file on batch_results (batch, file, place);
create index if not exists responses_unanswered on responses (rowid) where request is not null;
"""
_CHANGES = """
create table if not exists changes (
    seq bigint generated always as identity primary key,
    relation text not null,
    key text not null,
    at timestamptz not null default now()
);
create or replace function personae_note_change() returns trigger language plpgsql as $$
begin
    perform pg_advisory_xact_lock(LOCK);
    if tg_op <> 'INSERT' then
        insert into changes (relation, key) values (tg_table_name, to_jsonb(old) ->> tg_argv[0]);
    end if;
    if tg_op <> 'DELETE' then
        insert into changes (relation, key) values (tg_table_name, to_jsonb(new) ->> tg_argv[0]);
    end if;
    perform pg_notify('personae', '');
    return null;
end $$;
"""

_LATER = """
do $$ begin
    if not exists (
        select from information_schema.columns
        where table_schema = current_schema() and table_name = '{table}' and column_name = '{column}'
    ) then
        alter table {table} add column {column} {kind};
    end if;
end $$;
"""  # an alter that changes nothing would wait for everybody who reads the table

_KINDS = (
    (r"shared integer", "shared boolean"),
    (r"place integer primary key", "place bigint generated always as identity primary key"),
    (r"\binteger\b", "bigint"),
    (r"\breal\b", "double precision"),
    (r"\bblob\b", "bytea"),
    (r"\btext\b", 'text collate "C"'),
    (r"\) strict;", ");"),
)


def postgres(lock: int) -> str:
    """The same tables for PostgreSQL, and a record of changes of the mirrored ones.

    A transaction that writes holds the advisory lock number `lock`, so changes are numbered in the order of
    their commits.
    """
    text = SQLITE
    for table, column, kind in LATER_COLUMNS:
        text += _LATER.format(table=table, column=column, kind=kind)
    for kind, instead in _KINDS:
        text = re.sub(kind, instead, text)
    for table in _NUMBERED:
        begin = f"create table if not exists {table} (\n"
        text = text.replace(begin, f"{begin}    rowid bigint generated always as identity,\n")
    triggers = "".join(
        f"create or replace trigger note_change after insert or update or delete on {table} "
        f"for each row execute function personae_note_change('{key}');\n"
        for table, key in MIRRORED.items()
    )
    return text + _SHARED + _CHANGES.replace("LOCK", str(lock)) + triggers


def check_database_url(url: str) -> str:
    """The URL of a PostgreSQL database. Raises ValueError, without the URL: it may have a password."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("this is no PostgreSQL URL; write one like postgresql://user@host/name.")
    return url


def mirrored_columns(table: str, columns: list[str]) -> list[str]:
    """The columns of a mirrored table that are copied: SQLite's own ones, and the order of the rows."""
    return ["rowid", *columns] if table in _NUMBERED else columns
