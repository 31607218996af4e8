"""Interprets a text on the command line: as a path, or as a name on the Hugging Face Hub."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?::(?P<file>[A-Za-z0-9._-]+))?(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?"
)
_ADDRESS = re.compile(r"(?:https?:/{1,2})?(?:huggingface\.co|hf\.co)/(?P<rest>[^/]+/[^/]+).*")
_OWN_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}|{_PART}/{_PART}")


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository: `org/name`. `file` is a part of a GGUF file's name, such as `Q4_K_M`; `revision` is a
    branch, a tag or a commit."""

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        file = "" if self.file is None else f":{self.file}"
        return self.repo + file + ("" if self.revision is None else f"@{self.revision}")


class NamedSource(NamedTuple):
    """One value of `--adapters`. Without a `name`, `place` is a folder of adapters, or one on the Hub."""

    name: str | None
    place: Path | HubName


def hub_name(path: Path) -> HubName | None:
    """The repository that a text names, as `org/name`, `org/name:FILE` or `org/name@REVISION`. None for paths
    that exist on this machine, and for what cannot be such a name."""
    match = _NAME.fullmatch(str(path))
    if match is None or path.exists() or ".." in str(path):
        return None
    return HubName(match["repo"], match["file"], match["revision"])


def pasted(path: Path) -> str | None:
    """`org/name`, if the text is the address of a page of the Hub."""
    match = _ADDRESS.fullmatch(str(path))
    return None if match is None else match["rest"]


def adapter_source(path: Path) -> NamedSource:
    """The meaning of a value of `--adapters`: `DIR`, `NAME=DIR`, `org/name` or `NAME=org/name`.

    Raises ValueError if it is none of these.
    """
    if path.is_dir():
        return NamedSource(None, path)
    name, equals, rest = str(path).partition("=")
    if not equals:
        return NamedSource(None, _place(path))
    if _OWN_NAME.fullmatch(name) is None:
        raise ValueError(
            f"'{name}' cannot be an adapter's name: it has letters, digits, '.', '_' and '-', at most 64."
        )
    return NamedSource(name, _place(Path(rest).expanduser()))


def check_adapters(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """The values of `--adapters`. Raises ValueError if one of them is invalid."""
    for path in paths:
        adapter_source(path)
    return paths


def _place(path: Path) -> Path | HubName:
    if path.is_dir():
        return path
    if (name := hub_name(path)) is not None and name.file is None:
        return name
    if path.exists():
        raise ValueError(f"'{path}' is not a folder.")
    page = pasted(path) or ("org/name" if path.name == str(path) else None)
    hint = "" if page is None else f" An adapter on the Hub is named {page}."
    raise ValueError(f"'{path}' does not exist.{hint}")
