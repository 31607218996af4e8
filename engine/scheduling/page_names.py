"""The names of full pages: one hash chain over the tenant's salt, the adapter's digest and all tokens so far.

The prefix cache, its events, the placement of requests and the tiers below the device use the same names. So
code that knows the salt, the adapter and the tokens can compute where a prompt's pages are. The salt never
leaves the server. What else decides a page's content (the model, its numerics class, the layout) is the same
for all pages of an engine: a tier keeps it with its pages (`engine/tiers/disk.py`), so that a name means
the same to engines that differ in it.
"""

import hmac
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b, sha256

from personae.engine.plan import PageKey
from personae.engine.sequence import SequenceLog

RootKey = tuple[str, bytes] | tuple[str, bytes, str]
Token = int | tuple[str, int]
"""A token id. At the token where an adapter becomes active, with the adapter's digest (see
`LiveSequence.cache_key`)."""
NAME_BYTES = 32
TENANT_BYTES = 16


def tenant_salt(secret: bytes, tenant: str) -> bytes:
    """A tenant's salt, which only those who know the secret can compute."""
    return hmac.digest(secret, tenant.encode(), sha256)


def root_key(salt: bytes, adapter: str | None) -> RootKey:
    """The tagged key that separates tenants and adapters. The base model has its own tag."""
    return ("base", salt) if adapter is None else ("adapter", salt, adapter)


def root_name(key: RootKey) -> bytes:
    """The parent name of the first page of a (salt, adapter)."""
    parts = [part if isinstance(part, bytes) else part.encode() for part in key]
    return _hash(b"".join(len(part).to_bytes(4, "little") + part for part in parts))


def page_name(parent: bytes, chunk: Sequence[Token]) -> bytes:
    """The name of the page with these tokens after the page `parent`."""
    return _hash(parent + chunk_bytes(chunk))


def page_keys(root: RootKey, tokens: Sequence[Token], page_size: int) -> list[PageKey]:
    """The keys of the full pages of a log's tokens, as the prefix cache keys them."""
    keys, parent = [], root_name(root)
    for end in range(page_size, len(tokens) + 1, page_size):
        chunk = chunk_bytes(tokens[end - page_size : end])
        keys.append(PageKey(_hash(parent + chunk), parent, chunk))
        parent = keys[-1].name
    return keys


def chunk_bytes(chunk: Sequence[Token]) -> bytes:
    """The tokens of a page, in bytes. Different tokens have different bytes."""
    try:
        return b"i" + array("q", chunk).tobytes()  # type: ignore[type-var]  # nearly always only numbers
    except TypeError:
        return b"r" + repr(tuple(chunk)).encode()


def chunk_tokens(chunk: bytes) -> tuple[int, ...] | None:
    """The tokens that `chunk_bytes` turned into bytes, if all of them are ids."""
    if chunk[:1] != b"i" or len(chunk) % 8 != 1:
        return None
    return tuple(array("q", chunk[1:]))


def tenant_digest(name: str) -> bytes:
    """A tenant, as tiers know it."""
    return blake2b(name.encode(), digest_size=TENANT_BYTES).digest()


def session_digest(name: str) -> bytes:
    """A session, as tiers know it."""
    return blake2b(name.encode(), digest_size=TENANT_BYTES).digest()


def event_name(name: bytes) -> int:
    """A name as vLLM's events have it: eight bytes of it, as a signed 64-bit number."""
    return int.from_bytes(name[:8], "big", signed=True)


def block_names(log: SequenceLog, page_size: int) -> Iterator[int]:
    """The names of the full pages of a log, in order, as events have them."""
    starts = log.adapter_start if log.adapter is not None else 0
    name = root_name(root_key(log.salt, None if starts else log.adapter))
    for at in range(0, len(log.tokens) - page_size + 1, page_size):
        chunk: tuple[Token, ...] = log.tokens[at : at + page_size]
        if starts and log.adapter is not None and at <= starts < at + page_size:
            inside = starts - at
            chunk = (*chunk[:inside], (log.adapter, log.tokens[starts]), *chunk[inside + 1 :])
        name = page_name(name, chunk)
        yield event_name(name)


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=NAME_BYTES).digest()
