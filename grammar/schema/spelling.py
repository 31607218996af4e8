"""Keywords and formats that are spelled nearly as one that binds. JSON Schema passes over what it does not
know; in a schema that is to be enforced wholly a slip would bind nothing, and nobody would be told.
"""

from functools import lru_cache

from personae.errors import GrammarError
from personae.grammar.schema.document import SCHEMA_PARAM, Schema, pointer
from personae.grammar.schema.formats import FORMATS
from personae.grammar.schema.gate import ASSERTIONS
from personae.grammar.schema.walk import subschemas
from personae.grammar.slips import nearest


def check_spelling(document: Schema) -> None:
    """Raises GrammarError, with the place and what was probably meant. Names that begin as none of JSON
    Schema's do (`x-`, `_`, `@`) are the writer's own."""
    for schema, path in subschemas(document):
        for name, value in schema.items():
            if (meant := _meant_keyword(name)) is not None:
                raise _refused("keyword", name, meant, pointer((*path, name)))
            if name == "format" and isinstance(value, str) and (meant := _meant_format(value)) is not None:
                raise _refused("format", value, meant, pointer((*path, name)))


@lru_cache(4096)
def _meant_keyword(name: str) -> str | None:
    if name in ASSERTIONS or name.startswith(("x-", "_", "@")):
        return None
    return nearest(name, ASSERTIONS)


@lru_cache(4096)
def _meant_format(name: str) -> str | None:
    return None if name in FORMATS else nearest(name, FORMATS)


def _refused(kind: str, name: str, meant: str, place: str) -> GrammarError:
    return GrammarError(
        f"The {kind} {name[:80]!r} at {place} is not known and would bind nothing; did you mean {meant!r}? "
        "With strict set to false it is passed over.",
        param=SCHEMA_PARAM,
    )
