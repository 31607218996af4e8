"""What a source is: a URL, and the operator's list of prefixes that sources must begin with.

hf://org/name              hf://org/name@REVISION            hf://org/name@REVISION/folder
s3://bucket/folder         gs://bucket/folder                az://container/folder
file:///folder
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from urllib.parse import unquote

import msgspec

from personae.errors import Forbidden, RequestError

HUB, FILE = "hf", "file"
STORES = ("s3", "gs", "az")
SCHEMES = (HUB, *STORES, FILE)
_LONGEST = 1024
_PART = re.compile(r"[A-Za-z0-9._~+=,-]+")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~+=,/-]*")
_FORMS = (
    "hf://org/name@REVISION, s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///folder"
)


class SourceUrl(msgspec.Struct, frozen=True):
    """A source. `parts` are the names between slashes: for the Hub the organization, the repository and the
    folders in it, for an object store the bucket and the folders, for `file` the folders from the root.
    `revision` is a branch, a tag or a commit of the Hub."""

    scheme: str
    parts: tuple[str, ...]
    revision: str | None = None

    def __str__(self) -> str:
        if self.scheme == FILE:
            return f"file:///{'/'.join(self.parts)}"
        if self.revision is None:
            return f"{self.scheme}://{'/'.join(self.parts)}"
        at = "/".join(self.parts[:2]) + "@" + self.revision.replace("/", "%2F")
        return f"{self.scheme}://{'/'.join((at, *self.parts[2:]))}"

    @property
    def repository(self) -> str:
        """The repository of a source on the Hub."""
        return "/".join(self.parts[:2])

    @property
    def name(self) -> str:
        """The name of the adapter, if the request gives none: the last part."""
        return self.parts[-1]


def parse_source(text: str) -> SourceUrl:
    """The source that a request names. Raises RequestError."""
    try:
        source = _parsed(text)
        if len(source.parts) < 2 and source.scheme != FILE:
            raise ValueError("it names no folder with an adapter")
    except ValueError as error:
        raise RequestError(
            f"`source` cannot be read: {error}. Write it as {_FORMS}.", param="source", code="invalid_source"
        ) from None
    return source


def check_prefixes(prefixes: tuple[str, ...]) -> tuple[str, ...]:
    """The values of `--adapter-source`. Raises ValueError."""
    for text in prefixes:
        try:
            prefix = _parsed(text, prefix=True)
        except ValueError as error:
            raise ValueError(f"'{text}' is no source: {error}.") from None
        if not prefix.parts and prefix.scheme != HUB:
            raise ValueError(f"'{text}' must name a {'folder' if prefix.scheme == FILE else 'bucket'}.")
        if prefix.revision is not None:
            raise ValueError(f"'{text}' has a revision; requests choose that.")
        if prefix.scheme in STORES and find_spec("obstore") is None:
            raise ValueError(f"'{text}' needs obstore (pip install obstore).")
    return prefixes


def allowed_prefix(source: SourceUrl, prefixes: Sequence[str]) -> SourceUrl:
    """The first prefix that the source begins with, whole parts compared. Raises Forbidden."""
    for text in prefixes:
        prefix = _parsed(text, prefix=True)
        if prefix.scheme == source.scheme and source.parts[: len(prefix.parts)] == prefix.parts:
            return prefix
    if not prefixes:
        raise Forbidden(
            "No source may be fetched from: start the server with --adapter-source.",
            param="source",
            code="source_not_allowed",
        )
    raise Forbidden(
        f"`{source}` is not below one of the server's --adapter-source prefixes.",
        param="source",
        code="source_not_allowed",
    )


def _parsed(text: str, *, prefix: bool = False) -> SourceUrl:
    """Raises ValueError that says what is wrong, without a full stop."""
    if len(text) > _LONGEST:
        raise ValueError(f"it has more than {_LONGEST} characters")
    scheme, colon, rest = text.partition("://")
    if not colon or scheme not in SCHEMES:
        raise ValueError(f"it begins with none of {', '.join(f'{each}://' for each in SCHEMES)}")
    if scheme == FILE:
        if not rest.startswith("/"):
            raise ValueError("after file:// comes a path from the root, which begins with a slash")
        rest = rest[1:]
    rest = rest.removesuffix("/")
    parts = rest.split("/") if rest else []
    revision = None
    if scheme == HUB and len(parts) > 1 and "@" in parts[1]:
        parts[1], _, encoded = parts[1].partition("@")
        revision = unquote(encoded)
        if _REVISION.fullmatch(revision) is None or ".." in revision:
            raise ValueError(f"'{encoded[:80]}' is no revision")
    for part in parts:
        if _PART.fullmatch(part) is None or set(part) <= {"."}:
            raise ValueError(f"'{part[:80]}' is no name; names have letters, digits and . _ ~ + = , -")
    if not parts and not prefix:
        raise ValueError("it names nothing")
    return SourceUrl(scheme, tuple(parts), revision)
