"""The files of a GGUF model, and their headers."""

import re
from collections.abc import Sequence
from pathlib import Path

from personae.engine.checkpoints.gguf.header import Header, read_header
from personae.engine.checkpoints.gguf.metadata import Metadata
from personae.engine.checkpoints.listing import listing
from personae.errors import ModelLoadError

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def read_headers(path: Path) -> list[Header]:
    """The headers of a model's files. `path` is the only file or the first. Raises ModelLoadError."""
    return [read_header(part) for part in parts(path)]


def metadata_of(headers: Sequence[Header]) -> Metadata:
    """The metadata of a model, from its first file. Raises ModelLoadError if the files are not the parts of
    one model."""
    first = headers[0]
    metadata = Metadata(first.metadata, first.path.name)
    count = metadata.integer("split.count", default=1)
    if max(count, 1) != len(headers):
        raise metadata.error("split.count", f"is {count}, but the file's name says {len(headers)}")
    for place, header in enumerate(headers):
        number = Metadata(header.metadata, header.path.name).integer("split.no", default=0)
        if number != place:
            raise ModelLoadError(f"{header.path.name}: split.no: is {number}, but its name says {place}")
    return metadata


def parts(path: Path) -> list[Path]:
    """All files of a model, given the first one. Raises ModelLoadError if one is missing."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, number, count = match[1], int(match[2]), int(match[3])
    if number != 1:
        raise ModelLoadError(f"{path.name} is part {number} of {count}; name the first part")
    found = [path.with_name(f"{stem}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    missing = [file.name for file in found if not file.is_file()]
    if missing:
        raise ModelLoadError(f"{path.name} has missing parts: {listing(missing)}")
    return found


def gguf_in(folder: Path) -> Path | None:
    """The GGUF model in a folder, or None.

    Raises ModelLoadError if there are several.
    """
    files = sorted(path for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))
    firsts = [path for path in files if (part := PART.fullmatch(path.name)) is None or part[2] == "00001"]
    if len(firsts) > 1:
        raise ModelLoadError(
            f"{folder} has several models; name one of the files: {listing(path.name for path in firsts)}"
        )
    return firsts[0] if firsts else files[0] if files else None
