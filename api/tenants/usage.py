"""Usage by hour, tenant, key and adapter: counted in memory, and added up in the data directory."""

import csv
import io
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Literal, NamedTuple, get_args

import msgspec

from personae.api.tenants.data import DataDir
from personae.api.tenants.flusher import flushed
from personae.api.tenants.store import Identity
from personae.errors import RequestError, StorageFailed

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 10.0
MOST_ROWS = 10_000
DAY = 86400
_HOUR = 3600
_MINUTE = 60
_KEPT_SECONDS = 400 * 86400
_MOST_PENDING = 100_000  # sums in memory; further ones have no adapter's name

Column = Literal["hour", "tenant", "key", "adapter", "version"]
COLUMNS: tuple[Column, ...] = get_args(Column)
_SHOWN: dict[Column, str] = {
    "adapter": "case when replace(adapter, '@', '') = adapter then adapter "
    "else rtrim(rtrim(adapter, '0123456789'), '@') end",
    "version": "adapter",
}
"""How the columns that differ come from the table's `adapter`, which has the exact version, as `poet@2`."""
_SUMS = ("requests", "prompt", "cached", "completion", "seconds", "spend")
_ADD = (
    "insert into usage (hour, tenant, key, adapter, requests, prompt, cached, completion, seconds, spend) "
    "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (hour, tenant, key, adapter) do update set "
    + ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in _SUMS)
)
NUMBERS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "adapter_seconds",
    "last_hour",
    "spend",
)
"""The numbers of a row, as they are shown."""
_Place = tuple[int, str, str, str]


class UsageRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sums over what `group_by` does not name. `hour` is the Unix time at which it began. `key` is empty for
    batches and servers without keys, `adapter` for the base; of several
    bases, for the first. `version` is the adapter's exact version, as
    `poet@2`; it is the name itself if the adapter was not uploaded. `adapter_seconds` says how long
    sequences ran with the adapter, each from its first step on; sequences that ran at the same time count
    separately. `last_hour` is the Unix time at which the last hour that counts began. `spend` is what it cost
    at the prices of its time."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    adapter_seconds: float
    last_hour: int
    hour: int | None = None
    tenant: str | None = None
    key: str | None = None
    adapter: str | None = None
    version: str | None = None
    spend: float = 0.0


class DayUse(NamedTuple):
    """What a tenant uses in a day: tokens of prompts and answers, and money."""

    tokens: int = 0
    spend: float = 0.0

    def plus(self, other: "DayUse") -> "DayUse":
        """Both."""
        return DayUse(self.tokens + other.tokens, self.spend + other.spend)

    def minus(self, other: "DayUse") -> "DayUse":
        """What is left."""
        return DayUse(self.tokens - other.tokens, self.spend - other.spend)


class UsageLedger:
    """Counts usage. `add` takes as long as a dictionary update; a thread writes the sums every few seconds
    within `running`.

    A server that is killed loses what it has not written yet.
    """

    def __init__(self, data: DataDir, clock: Callable[[], float] = time.time) -> None:
        self._data = data
        self._clock = clock
        self._lock = threading.Lock()
        self._flushing = threading.Lock()  # who flushes after another waits until that has written
        self._pending: dict[_Place, list[float]] = {}
        self._seen: dict[str, int] = {}
        self._day = 0
        self._days: dict[str, DayUse] = {}

    def add(
        self,
        who: Identity,
        adapter: str | None,
        prompt: int,
        cached: int,
        completion: int,
        seconds: float = 0.0,
        spend: float = 0.0,
    ) -> None:
        """Count a request that has ended, the `seconds` that it ran with its adapter, and what it costs."""
        hour = int(self._clock()) // _HOUR * _HOUR
        use = self.today(who.tenant).plus(DayUse(prompt + completion, spend))
        with self._lock:
            self._days[who.tenant] = use
            named = adapter or "" if len(self._pending) < _MOST_PENDING else ""
            sums = self._pending.setdefault((hour, who.tenant, who.key or "", named), [0, 0, 0, 0, 0.0, 0.0])
            for index, number in enumerate((1, prompt, cached, completion, seconds, spend)):
                sums[index] += number

    def today(self, tenant: str) -> DayUse:
        """What a tenant has used since the day began, in UTC. What other servers of a shared database counted
        is in it after their next write and ours."""
        day = int(self._clock()) // DAY
        with self._lock:
            if day != self._day:
                self._day, self._days = day, {}
            return self._days.get(tenant, DayUse())

    def _read_day(self) -> None:
        """Read what was written of the day, by this server or others."""
        day = int(self._clock()) // DAY
        query = (
            "select tenant, sum(prompt + completion) as tokens, sum(spend) as spend from usage "
            "where hour >= ? group by tenant"
        )
        with self._data.read() as db:
            rows = db.execute(query, (day * DAY,)).fetchall()
        with self._lock:
            days = {row["tenant"]: DayUse(int(row["tokens"]), row["spend"]) for row in rows}
            for (hour, tenant, _, _), sums in self._pending.items():
                if hour >= day * DAY:
                    use = DayUse(int(sums[1] + sums[3]), sums[5])
                    days[tenant] = days.get(tenant, DayUse()).plus(use)
            self._day, self._days = day, days

    def saw(self, key: str) -> None:
        """Record that a key was used now."""
        with self._lock:
            self._seen[key] = int(self._clock()) // _MINUTE * _MINUTE

    @contextmanager
    def running(self) -> Iterator["UsageLedger"]:
        """Write regularly while the block runs, and when it ends. Raises StorageFailed."""
        self._read_day()
        with flushed("usage", self.flush, FLUSH_SECONDS, logger, self._data.failures):
            yield self

    def flush(self) -> None:
        """Write what was counted until now, also if another thread has begun to. Raises StorageFailed; the
        counts are then kept. A count that the database refuses for another reason is logged and left out, and
        the others are written."""
        with self._flushing:
            self._flush()
            if self._data.shared:
                self._read_day()

    def _flush(self) -> None:
        with self._lock:
            pending, self._pending = self._pending, {}
            seen, self._seen = self._seen, {}
        if not pending and not seen:
            return
        try:
            try:
                self._write(pending, seen)
            except StorageFailed:
                raise
            except Exception:
                self._write_alone(pending, seen)
        except BaseException:
            with self._lock:
                for place, sums in pending.items():
                    later = self._pending.setdefault(place, [0, 0, 0, 0, 0.0, 0.0])
                    self._pending[place] = [a + b for a, b in zip(sums, later, strict=True)]
                self._seen = seen | self._seen
            raise

    def _write(self, pending: dict[_Place, list[float]], seen: dict[str, int]) -> None:
        with self._data.write() as db:
            db.executemany(_ADD, [(*place, *sums) for place, sums in pending.items()])
            db.execute("delete from usage where hour < ?", (int(self._clock()) - _KEPT_SECONDS,))
            db.executemany("update keys set used = ? where id = ?", [(at, id) for id, at in seen.items()])

    def _write_alone(self, pending: dict[_Place, list[float]], seen: dict[str, int]) -> None:
        """Write each in a transaction of its own. What is written, or refused, is taken out."""
        for place, sums in list(pending.items()):
            try:
                self._write({place: sums}, {})
            except StorageFailed:
                raise
            except Exception as error:
                self._data.failures.add("usage")
                logger.error("usage of %s is lost: %s", place, sums, exc_info=error)
            del pending[place]
        self._write({}, seen)

    def rows(
        self,
        group_by: Sequence[Column],
        *,
        tenant: str | None = None,
        key: str | None = None,
        adapter: str | None = None,
        begin: int | None = None,
        end: int | None = None,
    ) -> tuple[list[UsageRow], bool]:
        """The sums of the hours from `begin` (inclusive) to `end` (exclusive), of one tenant, key or adapter
        or of all, by time and name; and whether there are more. An empty `key` or `adapter` is none: what
        batches and the base used."""
        grouped = ", ".join(_SHOWN.get(name, name) for name in group_by)
        named = [f"{_SHOWN.get(name, name)} as {name}_shown" for name in group_by]
        sums = ", ".join(f"sum({name}) as {name}" for name in _SUMS) + ", max(hour) as last_hour"
        query = (
            f"select {', '.join([*named, sums])} from usage where (? is null or tenant = ?) "  # noqa: S608  our own words
            f"and (? is null or key = ?) and (? is null or {_SHOWN['adapter']} = ?) "
            "and (? is null or hour >= ?) and (? is null or hour < ?)"
            + (f" group by {grouped} order by {grouped}" if group_by else " having count(*) > 0")
            + " limit ?"
        )
        values = (tenant, tenant, key, key, adapter, adapter, begin, begin, end, end, MOST_ROWS + 1)
        with self._data.read() as db:
            found = db.execute(query, values).fetchall()
        rows = [
            UsageRow(
                row["requests"],
                row["prompt"],
                row["cached"],
                row["completion"],
                round(row["seconds"], 3),
                row["last_hour"],
                spend=round(row["spend"], 6),
                **{name: row[f"{name}_shown"] for name in group_by},
            )
            for row in found[:MOST_ROWS]
        ]
        return rows, len(found) > MOST_ROWS


def columns_of(text: str) -> list[Column]:
    """The columns of a `group_by`, separated by commas. Raises RequestError."""
    named = [name.strip() for name in text.split(",") if name.strip()]
    for name in named:
        if name not in COLUMNS:
            raise RequestError(
                f"`group_by` names {name[:40]!r}; it may name {', '.join(COLUMNS)}.", param="group_by"
            )
    return [column for column in COLUMNS if column in named]


def as_csv(rows: Sequence[UsageRow], group_by: Sequence[Column]) -> str:
    """The rows with a line of names before them."""
    names = [*group_by, *NUMBERS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([cell(getattr(row, name)) for name in names] for row in rows)
    return text.getvalue()


def cell(value: object) -> str:
    """A value in a table; a number without an exponent."""
    return f"{Decimal(repr(value)):f}" if isinstance(value, float) else "" if value is None else str(value)
