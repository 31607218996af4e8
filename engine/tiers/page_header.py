"""The header of a page that a tier keeps: which page it is, whose it is, and checksums.

The identity is a digest of everything besides the tokens that decides a page's content. A header has it too,
with the page's name, its parent's name and its tokens, which are compared with what was asked for. So a page
that is torn, damaged, older or of another model is never used.
"""

import struct
import zlib
from typing import NamedTuple

from personae.engine.plan import PageKey, PageOwner
from personae.engine.tiers.tier import PageBytes

# Magic, identity, number of the write, name, parent, tenant, weight, session, bytes of tokens, checksum.
_HEADER = struct.Struct("<8s16sQ32s32s16sd16sHI")
_MAGIC = b"PKVPAGE3"
_CHECKSUM = struct.Struct("<I")
NAME_BYTES = 32
DIGEST_BYTES = 16  # of an identity, a tenant, a session
NO_SESSION = bytes(DIGEST_BYTES)


class PageHeader(NamedTuple):
    """The number of the write, and what was written. `checksum` is the page's."""

    number: int
    key: PageKey
    owner: PageOwner
    checksum: int


def header_bytes(token_bytes: int) -> int:
    """The bytes of the header of a page whose tokens have so many."""
    return _HEADER.size + token_bytes + _CHECKSUM.size


def pack_header(identity: bytes, number: int, key: PageKey, owner: PageOwner, page: PageBytes) -> bytes:
    """The header of this page."""
    checksum = zlib.crc32(page.data)
    header = _HEADER.pack(_MAGIC, identity, number, key.name, key.parent, *owner, len(key.tokens), checksum)
    header += key.tokens
    return header + _CHECKSUM.pack(zlib.crc32(header))


def unpack_header(identity: bytes, data: bytes | bytearray | memoryview) -> PageHeader | None:
    """The header at the beginning of `data`; None if there is no whole one of this identity."""
    if len(data) < _HEADER.size:
        return None
    magic, found, number, name, parent, *owner, length, checksum = _HEADER.unpack_from(data)
    end = _HEADER.size + length
    if magic != _MAGIC or found != identity or end + _CHECKSUM.size > len(data):
        return None
    if _CHECKSUM.unpack_from(data, end)[0] != zlib.crc32(data[:end]):
        return None
    key = PageKey(name, parent, bytes(data[_HEADER.size : end]))
    tenant, weight, session = owner
    session = b"" if session == NO_SESSION else session
    return PageHeader(number, key, PageOwner(tenant, weight, session), checksum)
