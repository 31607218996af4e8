"""Loosens a spec to little more than the types of its schemas, for when nothing stricter works."""

import json

import msgspec

from personae.grammar.schema.prepare import loose
from personae.grammar.spec import GrammarSpec
from personae.grammar.structure.elements import (
    Element,
    Json,
    Lark,
    Regex,
    decode_structure,
    replace_bound,
    structure_spec,
)


def loosened(spec: GrammarSpec) -> GrammarSpec | None:
    """The spec with loose schemas in place of those that are not strict. None if it has none."""
    if spec.kind == "json_schema" and not spec.strict:
        return msgspec.structs.replace(spec, source=json.dumps(loose(msgspec.json.decode(spec.source))))
    if spec.kind != "structure":
        return None
    found = False

    def loosen(element: Json | Regex | Lark) -> Element:
        nonlocal found
        if not isinstance(element, Json) or element.strict:
            return element
        found = True
        return msgspec.structs.replace(element, schema=loose(element.schema))

    whole = replace_bound(decode_structure(spec.source), loosen)
    return structure_spec(whole) if found else None
