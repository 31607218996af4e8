"""Specs that use everything that is built on first use: backends, validators, patterns."""

import json
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from personae.errors import GrammarError
from personae.grammar.schema.formats import FORMATS
from personae.grammar.spec import GrammarSpec

if TYPE_CHECKING:
    from personae.grammar.compiler import GrammarCompiler

_DIALECTS = (
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema#",
    "http://json-schema.org/draft-06/schema#",
    "http://json-schema.org/draft-04/schema#",
)
_FORMATTED = {name: {"type": "string", "format": name} for name in sorted(FORMATS)}
_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "kind": {"enum": ["one", "another"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "at": {"type": "string", "pattern": "^[a-z]+$"},
    },
    "required": ["name"],
}
_REWRITTEN = {"allOf": [_OBJECT, {"properties": {"kind": {"not": {"const": "one"}}}}]}


def _spec(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema), strict=False)


# The first one covers the most at the least cost.
FIRST_SPECS = (
    _spec(_REWRITTEN),
    GrammarSpec("json_object"),
    *(_spec({"$schema": dialect, **_OBJECT}) for dialect in _DIALECTS),
    *(_spec(one) for one in _FORMATTED.values()),
)


def warm_up_specs(compiler: "GrammarCompiler", specs: Iterable[GrammarSpec]) -> None:
    """Compile them and discard the results."""
    for spec in specs:
        with suppress(GrammarError):
            compiler.analyse(spec)
