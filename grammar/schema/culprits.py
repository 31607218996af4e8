"""Finds which keywords of a schema have to go so that the rest can be enforced, all of them at once."""

from collections.abc import Callable, Iterable, Iterator
from time import process_time
from typing import Any

from personae.errors import GrammarError, NotEnforced
from personae.grammar.schema.document import Schema
from personae.grammar.schema.gate import ASSERTIONS, Unenforced, unenforced
from personae.grammar.schema.prepare import Culprit, contradictory, refusal, refused, without
from personae.grammar.schema.walk import Path, children

# Nearly always enforced. These are blamed only if leaving out all the rest does not help.
_HARMLESS = frozenset({"type", "properties", "$ref"})
# Blamed as a whole, because without a part of them they would mean something else.
_WHOLE = frozenset({"not", "oneOf", "if", "contains", "propertyNames", "dependentSchemas", "dependencies"})
_WITH_OTHERS = frozenset({"then", "else", "minContains", "maxContains"})  # nothing without the others
_BACKEND = "llguidance"
_SECONDS = 1.0  # of processor time
_LEAST_TRIALS = 10


def culprits(
    document: Schema, enforced: Callable[[Schema], bool], *, seconds: float = _SECONDS
) -> list[Culprit]:
    """The keywords, with their paths, without which `enforced` accepts the schema; empty if they are not
    found within `seconds` of processor time. As many others as possible are kept, earlier ones rather than
    later ones."""
    if isinstance(document, bool):
        return []
    found = list(_candidates(document, ()))
    end = process_time() + seconds
    blamed: list[Culprit] = []

    def passes(left_out: Iterable[Culprit]) -> bool:
        return enforced(without({path for _, path in left_out}, document))

    def look(group: list[Culprit], later: list[Culprit]) -> None:
        """Blame those of `group` that have to go, while `later` are left out."""
        if not group or process_time() > end or passes([*blamed, *later]):
            return
        if len(group) == 1:
            blamed.extend(group)
            return
        half = len(group) // 2
        look(group[:half], [*group[half:], *later])
        look(group[half:], later)

    for candidates in ([one for one in found if one[0] not in _HARMLESS], found):
        begun = process_time()
        passing = passes(candidates)
        if process_time() - begun > seconds / _LEAST_TRIALS:
            return []  # there is no time for that many trials
        if passing:
            look(candidates, [])
            break
    for whole in [one for one in blamed if one[0] in _WHOLE]:
        others = [one for one in blamed if one is not whole]
        within = _unenforced_within(document, whole[1])
        if within and process_time() < end and passes([*others, *within]):
            blamed = [*others, *within]
    return blamed if blamed and passes(blamed) else []


def _candidates(schema: dict[str, Any], path: Path) -> Iterator[Culprit]:
    """Keywords, outermost first. What is within one of `_WHOLE` is blamed with it."""
    for keyword in schema:
        if keyword in ASSERTIONS - _WITH_OTHERS:
            yield keyword, (*path, keyword)
    for step, child in children(schema):
        if step[0] not in _WHOLE | _WITH_OTHERS and isinstance(child, dict):
            yield from _candidates(child, (*path, *step))


def _unenforced_within(document: Schema, path: Path) -> list[Culprit]:
    """Everything below a path that no backend enforces."""
    return [
        (found.keyword, found.path)
        for found in unenforced(document, _BACKEND)
        if found.path[: len(path)] == path and len(found.path) > len(path)
    ]


def without_trials(
    document: Schema, reason: Unenforced | GrammarError | None, *, spent: float = 0.0
) -> GrammarError:
    """Why a strict schema is refused: bounds that no value satisfies, or `reason`, which `explained` may
    replace. `spent` are the seconds of processor time that its own trial took; if these are many, there are
    no further trials."""
    contradiction = contradictory(document)
    if contradiction is not None:
        return contradiction
    error = refusal(document, reason)
    error.unexplained = spent < _SECONDS
    return error


def explained(document: Schema, refusal: GrammarError, enforced: Callable[[Schema], bool]) -> GrammarError:
    """The refusal that names all keywords that have to go, each with its place. If they are not found, or
    `refusal` says all, `refusal` itself."""
    if not isinstance(refusal, NotEnforced) or not refusal.unexplained:
        return refusal
    blamed = culprits(document, enforced)
    return refused(document, blamed) if blamed else refusal
