"""Reads JSON-Schema-Test-Suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite), by draft.

Its schemas refer to documents on a server. Those are embedded under `$defs`, as bundles of JSON Schema are:
nothing is ever fetched.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from jsonschema_specifications import REGISTRY

from personae.evals.suites.schema_files import SchemaCase, read_schemas
from personae.grammar.schema.document import pointer
from personae.grammar.schema.references import Unresolved, missing

DRAFTS = {
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
_SERVER = "http://localhost:1234/"


def read_drafts(suite: Path) -> Iterator[tuple[str, list[SchemaCase]]]:
    """(draft, its required cases) for each draft that the suite's folder has."""
    remotes = {
        _SERVER + file.relative_to(suite / "remotes").as_posix(): json.loads(file.read_text())
        for file in sorted((suite / "remotes").rglob("*.json"))
    }
    for draft, named in DRAFTS.items():
        folder = suite / "tests" / draft
        if folder.is_dir():
            yield draft, [_whole(case, named, remotes) for case in read_schemas(folder)]


def _whole(case: SchemaCase, named: str, remotes: Mapping[str, Any]) -> SchemaCase:
    schema = case.schema
    if isinstance(schema, dict):
        schema = bundled({"$schema": named, **schema}, remotes)
    return SchemaCase(case.name, case.file, schema, case.instances)


def bundled(schema: dict[str, Any], remotes: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with everything within it that it refers to, as far as `remotes` or the drafts themselves
    have it."""
    home = "definitions" if "draft-07" in schema["$schema"] else "$defs"
    tried: set[str] = set()
    while True:
        try:
            wanted = sorted(missing(schema) - tried)
        except Unresolved:
            return schema
        if not wanted:
            return schema
        for address in wanted:
            tried.add(address)
            found = _document(address, remotes)
            if found is not None:
                embedded = {
                    f"{pointer((address, n))}": one for n, one in enumerate(_embedded(address, found))
                }
                schema = {**schema, home: schema.get(home, {}) | embedded}


def _document(address: str, remotes: Mapping[str, Any]) -> Any:
    if address in remotes:
        return remotes[address]
    for known in (address, address + "#"):
        if known in REGISTRY:
            return dict(REGISTRY.contents(known))
    return None


def _embedded(address: str, document: Any) -> Iterator[dict[str, Any]]:
    """The document under its address, and under its own identifier where that is another one."""
    if isinstance(document, bool):
        document = {"allOf": [document]}
    identifier = urljoin(address, document.get("$id", "")).rstrip("#")
    if document.get("$id", "").startswith("urn:"):
        identifier = document["$id"]
    yield {**document, "$id": identifier}
    if identifier != address:
        yield {"$id": address, "allOf": [{"$ref": identifier}]}
