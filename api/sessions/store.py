"""What is known of each session: when it was used, how much, and how long its keys and values are kept."""

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from personae.api.tenants.data import DataDir
from personae.api.tenants.flusher import flushed
from personae.api.wire.prompt_cache import LONGEST_NAME, CacheOptions
from personae.engine.scheduling.sessions import SESSIONS_OF_A_TENANT
from personae.errors import NotFound, RequestError

logger = logging.getLogger(__name__)

LONGEST_TTL = 30 * 86400
OPENAI_TTL = {"30m": 1800, "12h": 43_200}  # `prompt_cache_options.ttl`, in seconds
FLUSH_SECONDS = 2.0
_SUMS = ("requests", "prompt", "cached", "completion")
_PUT = (
    "insert into sessions (tenant, id, created, used, expires, ttl, requests, prompt, cached, completion) "
    "values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict (tenant, id) do update set "
    "used = excluded.used, expires = excluded.expires, ttl = excluded.ttl, "
    + ", ".join(f"{name} = sessions.{name} + excluded.{name}" for name in _SUMS)
)
_Key = tuple[str, str]  # tenant and name
_Counts = tuple[int, int, int, int]  # see _SUMS
_NOTHING = (0, 0, 0, 0)


class Session(msgspec.Struct, kw_only=True):
    """A session. The times are Unix times in seconds; `ttl` is how many seconds after its last request its
    keys and values are kept. The other numbers are sums over its requests."""

    id: str
    created_at: int
    last_used_at: int
    expires_at: int
    ttl: int
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    object: str = "session"


class Turn:
    """A request of a session while it runs, and what was asked meanwhile: `deleted`, or `changed`, where
    `ttl` is the new one."""

    __slots__ = ("changed", "deleted", "name", "tenant", "ttl")

    def __init__(self, tenant: str, name: str, ttl: int) -> None:
        self.tenant = tenant
        self.name = name
        self.ttl = ttl
        self.changed = self.deleted = False


class SessionStore:
    """The sessions of all tenants, in memory. A tenant has at most `most`; a further one takes the place of
    the least recently used. `ttl` is the default, in seconds.

    With `data`, a thread writes them there every few seconds within `running`. A server that is killed loses
    what it has not written yet.
    """

    def __init__(
        self,
        ttl: int,
        most: int = SESSIONS_OF_A_TENANT,
        clock: Callable[[], float] = time.time,
        data: DataDir | None = None,
    ) -> None:
        self._ttl = ttl
        self._most = most
        self._clock = clock
        self._data = data
        self._lock = threading.Lock()  # for what the thread reads
        self._tenants: dict[str, OrderedDict[str, Session]] = {}
        self._turns: dict[_Key, set[Turn]] = {}  # that run
        self._unwritten: dict[_Key, _Counts] = {}  # sessions that have changed, and what to add
        self._written: set[_Key] = set()  # sessions that may be in the database
        self._removed: set[_Key] = set()

    def ttl_of(self, tenant: str, name: str, options: CacheOptions | None) -> int:
        """How many seconds the next request's keys and values are kept after it."""
        session = self._live(tenant).get(name)
        ttl = self._ttl if session is None else session.ttl
        return ttl if options is None or options.ttl is None else max(ttl, OPENAI_TTL[options.ttl])

    def begin(self, tenant: str, name: str, ttl: int) -> Turn:
        """A request of the session begins to run. Pass what this returns to `end` or `withdraw`."""
        turn = Turn(tenant, name, ttl)
        if ttl:
            self._live(tenant)
            with self._lock:
                self._session(turn)
                self._turns.setdefault((tenant, name), set()).add(turn)
        return turn

    def end(self, turn: Turn, *, prompt: int, cached: int, completion: int) -> None:
        """Count a request that has ended, unless its session was deleted meanwhile."""
        self._leave(turn)
        if not turn.ttl or turn.deleted:
            return
        with self._lock:
            session = self._session(turn)
            session.last_used_at = now = int(self._clock())
            session.ttl, session.expires_at = turn.ttl, now + turn.ttl
            session.requests += 1
            session.prompt_tokens += prompt
            session.cached_tokens += cached
            session.completion_tokens += completion
            self._note((turn.tenant, turn.name), (1, prompt, cached, completion))

    def withdraw(self, turn: Turn) -> None:
        """A request was refused before anything was computed. It does not count."""
        self._leave(turn)
        key = turn.tenant, turn.name
        with self._lock:
            session = self._tenants.get(turn.tenant, OrderedDict[str, Session]()).get(turn.name)
            if session is not None and not session.requests and key not in self._turns:
                self._drop(*key)

    def list(self, tenant: str) -> list[Session]:
        """The tenant's sessions, the least recently used first."""
        return [*self._live(tenant).values()]

    def find(self, tenant: str, name: str) -> Session:
        """Raises NotFound."""
        session = self._live(tenant).get(name)
        if session is None:
            raise NotFound("There is no such session, or its time is over.", param="id")
        return session

    def keep(self, tenant: str, name: str, ttl: int) -> Session:
        """Change the session's ttl, and count it from now on. Raises NotFound."""
        session = self.find(tenant, name)
        with self._lock:
            session.ttl, session.expires_at = ttl, int(self._clock()) + ttl
            for turn in self._turns.get((tenant, name), ()):
                turn.ttl, turn.changed = ttl, True
            self._note((tenant, name), _NOTHING)
        return session

    def remove(self, tenant: str, name: str) -> None:
        """Forget the session, and the requests of it that run. Raises NotFound."""
        self.find(tenant, name)
        with self._lock:
            self._drop(tenant, name)
            for turn in self._turns.pop((tenant, name), ()):
                turn.deleted = True

    @contextmanager
    def running(self) -> Iterator["SessionStore"]:
        """Read what an earlier server wrote, and write regularly while the block runs and when it ends.
        Raises StorageFailed."""
        assert self._data is not None
        self._read(self._data)
        with flushed("sessions", self.flush, FLUSH_SECONDS, logger, self._data.failures):
            yield self

    def flush(self) -> None:
        """Write what has changed. Raises StorageFailed; it is then written the next time."""
        assert self._data is not None
        now = int(self._clock())
        with self._lock:
            unwritten, self._unwritten = self._unwritten, {}
            removed, self._removed = self._removed, set()
            rows = [
                _row(tenant, self._tenants[tenant][name], counts)
                for (tenant, name), counts in unwritten.items()
            ]
            self._written |= unwritten.keys()
        if not rows and not removed:
            return
        try:
            with self._data.write() as db:
                gone = [(tenant, _bytes(name)) for tenant, name in removed]
                db.executemany("delete from sessions where tenant = ? and id = ?", gone)
                db.execute("delete from sessions where expires <= ?", (now,))
                db.executemany(_PUT, rows)
        except BaseException:
            with self._lock:
                for key, counts in unwritten.items():
                    if key not in self._removed:  # meanwhile
                        self._note(key, counts)
                self._removed |= removed
            raise

    def _read(self, data: DataDir) -> None:
        query = "select * from sessions where expires > ? order by used"
        with data.read() as db:
            rows = db.execute(query, (int(self._clock()),)).fetchall()
        with self._lock:
            for row in rows:
                name = bytes(row["id"]).decode()
                sessions = self._tenants.setdefault(row["tenant"], OrderedDict())
                sessions[name] = Session(
                    id=name,
                    created_at=row["created"],
                    last_used_at=row["used"],
                    expires_at=row["expires"],
                    ttl=row["ttl"],
                    requests=row["requests"],
                    prompt_tokens=row["prompt"],
                    cached_tokens=row["cached"],
                    completion_tokens=row["completion"],
                )
                self._written.add((row["tenant"], name))
                if len(sessions) > self._most:
                    self._drop(row["tenant"], next(iter(sessions)))

    def _session(self, turn: Turn) -> Session:
        """The session of a request, which is now the most recently used one. Call it with the lock."""
        sessions = self._tenants.setdefault(turn.tenant, OrderedDict())
        session = sessions.get(turn.name)
        if session is None:
            now = int(self._clock())
            session = sessions[turn.name] = Session(
                id=turn.name, created_at=now, last_used_at=now, expires_at=now + turn.ttl, ttl=turn.ttl
            )
        sessions.move_to_end(turn.name)
        if len(sessions) > self._most:
            self._drop(turn.tenant, next(iter(sessions)))
        return session

    def _leave(self, turn: Turn) -> None:
        """The request does not run any more."""
        key = turn.tenant, turn.name
        with self._lock:
            if turns := self._turns.get(key):
                turns.discard(turn)
                if not turns:
                    del self._turns[key]

    def _note(self, key: _Key, counts: _Counts) -> None:
        """The session has changed. Call it with the lock."""
        if self._data is not None:
            before = self._unwritten.get(key, _NOTHING)
            requests, prompt, cached, completion = (a + b for a, b in zip(before, counts, strict=True))
            self._unwritten[key] = requests, prompt, cached, completion

    def _drop(self, tenant: str, name: str) -> None:
        """Remove a session. Call it with the lock."""
        del self._tenants[tenant][name]
        self._unwritten.pop((tenant, name), None)
        if (tenant, name) in self._written:
            self._written.remove((tenant, name))
            self._removed.add((tenant, name))

    def _live(self, tenant: str) -> OrderedDict[str, Session]:
        """The tenant's sessions that run or whose time is not over; the others are removed."""
        with self._lock:
            sessions, now = self._tenants.get(tenant, OrderedDict()), self._clock()
            over = [name for name, session in sessions.items() if session.expires_at <= now]
            for name in over:
                if (tenant, name) not in self._turns:
                    self._drop(tenant, name)
            if not sessions:
                self._tenants.pop(tenant, None)
            return sessions


def _row(tenant: str, session: Session, counts: _Counts) -> tuple[object, ...]:
    times = session.created_at, session.last_used_at, session.expires_at, session.ttl
    return tenant, _bytes(session.id), *times, *counts


def _bytes(name: str) -> bytes:
    """The name in the database: a text cannot have every character there."""
    return name.encode()


def checked_name(name: str, param: str) -> str:
    """The name of a session. Raises RequestError if it is too long, or empty."""
    if not 0 < len(name) <= LONGEST_NAME:
        raise RequestError(f"`{param}` must have 1 to {LONGEST_NAME} characters.", param=param)
    return name


def session_key(name: str) -> str:
    """The name as engines know it: short."""
    return hashlib.sha256(name.encode()).hexdigest()[:32]
