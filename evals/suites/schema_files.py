"""Schemas with instances from files: MaskBench's (one JSON object a line, `.jsonl` or `.jsonl.gz`) or
JSON-Schema-Test-Suite's (`.json`, a list of groups)."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from personae.errors import RequestError

SAMPLE = Path(__file__).parent / "sample" / "schemas.jsonl"


@dataclass(frozen=True, slots=True)
class SchemaCase:
    """A schema and its instances: (a description, the instance, whether it is valid)."""

    name: str
    file: str
    schema: Any
    instances: tuple[tuple[str, Any, bool], ...]


def read_schemas(path: Path, every: int = 1) -> list[SchemaCase]:
    """Every n-th schema of a file, or of all files of a folder. Raises RequestError."""
    files = sorted(file for file in path.iterdir() if _known(file)) if path.is_dir() else [path]
    cases = [case for file in files for case in _file(file)]
    if not cases:
        raise RequestError(f"{path} has no schemas in files of .jsonl, .jsonl.gz or .json.", param="data")
    return cases[::every]


def _known(file: Path) -> bool:
    return file.name.endswith((".jsonl", ".jsonl.gz", ".json"))


def _file(path: Path) -> Iterator[SchemaCase]:
    try:
        raw = path.read_bytes()
        if path.suffix == ".json":
            for group in msgspec.json.decode(raw):
                name = f"{path.stem}: {group['description']}"
                yield SchemaCase(name, path.stem, group["schema"], _instances(group["tests"]))
            return
        lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).splitlines()
        for row in map(msgspec.json.decode, lines):
            file = path.name.partition(".")[0]
            yield SchemaCase(row["id"], file, row["schema"], _instances(row.get("tests", ())))
    except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
        raise RequestError(f"{path} is not in the expected form: {error!r}.", param="data") from None


def _instances(tests: Any) -> tuple[tuple[str, Any, bool], ...]:
    return tuple((test.get("description", ""), test["data"], test["valid"]) for test in tests)
