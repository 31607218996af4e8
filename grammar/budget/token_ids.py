"""Rewrites grammars that name tokens by id, for use over bytes, where the ids are different."""

import re
from collections.abc import Iterator

from personae.errors import GrammarError
from personae.grammar.budget.table import TokenTable
from personae.grammar.schema.document import PARAMS

_MOST = 1024
# Skips quoted texts and regular expressions, in which the same characters mean themselves.
_PARTS = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(?P<named><\[(?P<ids>[^\]]*)\]>)')
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def over_bytes(source: str, table: TokenTable, param: str = PARAMS["lark"]) -> str:
    """A Lark grammar over the bytewise vocabulary, in which only special tokens have an id.

    Raises GrammarError, with `param`, for the id of any other token, because it would not be known how an
    answer could end.
    """

    def renamed(found: re.Match[str]) -> str:
        if found["named"] is None:
            return found[0]
        ids = [table.special_piece(token) for token in _ids(found["ids"])]
        if not ids or None in ids:
            raise GrammarError(
                f"`{param}`: {found['named'][:80]} names tokens that are not special tokens. An answer "
                "could not be closed within its budget. Write their text instead.",
                param=param,
            )
        return f"<[{','.join(map(str, ids))}]>"

    return _PARTS.sub(renamed, source)


def _ids(written: str) -> Iterator[int | None]:
    """The ids of a list of ranges. None if it is not such a list, or has too many ids."""
    for part in written.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            yield None
            return
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first > _MOST:
            yield None
            return
        yield from range(first, last + 1)
