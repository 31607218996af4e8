"""Enforces the limits of tenants.

Requests and tokens per minute are token buckets that hold one minute's worth: a tenant may use it at once,
and it refills evenly. The tokens of an answer are known only at its end. So a request begins when there are
enough tokens for its prompt. It then takes its prompt and the most that its answers may have, and at its end
it gets back what they did not need. So however many requests come at once, they exceed the limit by the
answers of one request at most. A bucket may be in debt, and the next request waits until the debt is paid.

A tenant without its own limit has that of `DEFAULTS`.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import msgspec

from personae.api.tenants.store import Identity, TenantLimits
from personae.errors import RateLimited

DEFAULTS = TenantLimits(requests_per_minute=30_000, concurrent=1024, body_bytes=64 * 2**20)
"""Far above what one client needs, and low enough that one tenant cannot use up the server."""

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}"
    for unit in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
"""The headers of an answer that say what is left of the tenant's limits."""
_CONCURRENT_RETRY = 1.0  # seconds; it is unknown when another one ends
_SEEN = 256  # schemas of a tenant that are not counted again
_REMEMBERED = 10_000  # tenants; one that is forgotten begins with a full minute


def limits_of(who: Identity) -> TenantLimits:
    """A tenant's limits, with the defaults where none are set."""
    return _with_defaults(who.limits)


@lru_cache(maxsize=1024)
def _with_defaults(limits: TenantLimits) -> TenantLimits:
    given = {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}
    return msgspec.structs.replace(DEFAULTS, **given)


class TokenBucket:
    """Fills at `per_minute` up to one minute's worth."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.reserved = 0  # tokens that were taken and may come back
        self._level = float(per_minute)
        self._at = now

    def wait(self, amount: float, now: float, leave: float = 0.0) -> float:
        """Seconds until there is this much and `leave` more (or a full bucket, if that is less); 0 if it is
        there now.

        For a bucket that never fills, a minute: the limit may have changed by then.
        """
        if not self.per_minute:
            return 60.0
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        missing = min(amount + leave, self.per_minute) - self._level
        return max(missing, 0.0) * 60 / self.per_minute

    def state(self, now: float) -> tuple[int, float]:
        """How much there is now, at least 0, and the seconds until the bucket is full."""
        level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        missing = self.per_minute - level
        return max(math.floor(level), 0), missing * 60 / self.per_minute if self.per_minute else 0.0

    def take(self, amount: float) -> None:
        """Use this much, going into debt if necessary."""
        self._level -= amount


class Reservation:
    """The tokens that the answers of a request may have, taken from a tenant's bucket."""

    def __init__(self, bucket: TokenBucket | None, tokens: int) -> None:
        self._bucket = bucket
        self._tokens = tokens
        if bucket is not None:
            bucket.take(tokens)
            bucket.reserved += tokens

    def settle(self, used: int) -> None:
        """Give back all but the tokens that were used. Later calls do nothing."""
        if self._bucket is not None:
            self._bucket.take(used - self._tokens)
            self._bucket.reserved -= self._tokens
            self._bucket = None


class _Account:
    def __init__(self) -> None:
        self.running = 0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self.schemas: TokenBucket | None = None
        self.fetches: TokenBucket | None = None
        self.seen: OrderedDict[int, None] = OrderedDict()  # hashes of schemas that are not counted again


class Meter:
    """Counts what every tenant uses. `clock` is in seconds and never goes backwards."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    @contextmanager
    def request(self, who: Identity, *, reads: bool = False) -> Iterator[None]:
        """Count one request while the block runs. One that only `reads` does not count towards the minute's.

        Raises RateLimited.
        """
        account, now, limits = self._account(who.tenant), self._clock(), limits_of(who)
        if limits.concurrent is not None and account.running >= limits.concurrent:
            raise RateLimited(
                f"{account.running} requests of this tenant are running, which is its limit.",
                retry_after=_CONCURRENT_RETRY,
            )
        account.requests = _bucket(account.requests, limits.requests_per_minute, now)
        if account.requests is not None and not reads:
            _demand(account.requests, 1, now, "requests")
            account.requests.take(1)
        account.running += 1
        try:
            yield
        finally:
            account.running -= 1

    def tokens(self, who: Identity, prompt: int, answer: int, *, spare: bool = False) -> Reservation:
        """Take a prompt's tokens, and reserve those that its answers may have at most; with `spare` only if
        the prompt leaves half a minute's worth. Raises RateLimited."""
        account, now = self._account(who.tenant), self._clock()
        account.tokens = _bucket(account.tokens, limits_of(who).tokens_per_minute, now)
        if account.tokens is not None:
            leave = account.tokens.per_minute / 2 if spare else 0.0
            _demand(account.tokens, max(prompt, 1), now, "tokens", leave)
            account.tokens.take(prompt)
        return Reservation(account.tokens, answer)

    def headers(self, who: Identity) -> dict[str, str]:
        """The tenant's limits a minute and what is left of them, as OpenAI's headers. Those of tokens are
        absent without such a limit. Tokens that a running answer may need are not left."""
        account, now, limits = self._account(who.tenant), self._clock(), limits_of(who)
        account.requests = _bucket(account.requests, limits.requests_per_minute, now)
        account.tokens = _bucket(account.tokens, limits.tokens_per_minute, now)
        found = {}
        for unit, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            if bucket is not None:
                left, seconds = bucket.state(now)
                found[f"x-ratelimit-limit-{unit}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{unit}"] = str(left)
                found[f"x-ratelimit-reset-{unit}"] = duration(seconds)
        return found

    def fetch(self, who: Identity, per_minute: int) -> None:
        """Count an adapter that a request of the tenant has fetched. Raises RateLimited."""
        account, now = self._account(who.tenant), self._clock()
        account.fetches = _bucket(account.fetches, per_minute, now)
        if account.fetches is not None:
            _demand(account.fetches, 1, now, "fetched adapters")
            account.fetches.take(1)

    def schema(self, who: Identity, source: str) -> None:
        """Count a schema that this tenant has not used recently, because it may have to be compiled. Raises
        RateLimited."""
        account, now, key = self._account(who.tenant), self._clock(), hash(source)
        account.schemas = _bucket(account.schemas, limits_of(who).schemas_per_minute, now)
        if account.schemas is None:
            return
        if key not in account.seen:
            _demand(account.schemas, 1, now, "new schemas")
            account.schemas.take(1)
        account.seen[key] = None
        account.seen.move_to_end(key)
        if len(account.seen) > _SEEN:
            account.seen.popitem(last=False)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.setdefault(tenant, _Account())
        self._accounts.move_to_end(tenant)
        if len(self._accounts) > _REMEMBERED:
            idle = next((name for name, each in self._accounts.items() if not each.running), tenant)
            if idle != tenant:
                del self._accounts[idle]
        return account


def duration(seconds: float) -> str:
    """Seconds as OpenAI's headers have them: `20ms`, `7.66s`, `1m30.5s`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 100) / 100, 60)
    return f"{f'{minutes:.0f}m' if minutes else ''}{round(rest, 2):g}s"


def _bucket(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    """The bucket for a limit that may have changed since."""
    if per_minute is None:
        return None
    if bucket is None or bucket.per_minute != per_minute:
        return TokenBucket(per_minute, now)
    return bucket


def _demand(bucket: TokenBucket, amount: float, now: float, unit: str, leave: float = 0.0) -> None:
    """Raises RateLimited unless there is this much."""
    wait = bucket.wait(amount, now, leave)
    if wait <= 0:
        return
    reason = f"This tenant's limit of {bucket.per_minute} {unit} a minute is reached"
    if bucket.reserved:  # it is unknown when these requests end, and how much they give back
        wait = max(wait - bucket.reserved * 60 / bucket.per_minute, _CONCURRENT_RETRY)
        reason += f", with {bucket.reserved} that the answers of its running requests may have at most"
    raise RateLimited(f"{reason}; come back in {math.ceil(wait)} s.", retry_after=wait)
