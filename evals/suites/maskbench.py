"""MaskBench: JSON Schemas with instances for the grammar compiler.

For each schema: is it accepted, how long does that take, and are exactly its valid instances accepted, token
by token? The data are MaskBench's (https://github.com/guidance-ai/jsonschemabench, one JSON object per line)
and the official JSON-Schema-Test-Suite's, if they are next to the repository:

    python -m personae.evals.suites.maskbench --every 10 --tokenizer TOKENIZER.json
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import typer
from rich.progress import track
from tokenizers import Tokenizer

from personae.errors import GrammarError, Overloaded
from personae.evals.suites.draft_suite import read_drafts
from personae.evals.suites.schema_files import SchemaCase, read_schemas
from personae.grammar.backend import BoundGrammar
from personae.grammar.bitmask import words_of
from personae.grammar.checked.grammar import CheckedGrammar, CheckedMatcher
from personae.grammar.compiler import GrammarCompiler
from personae.grammar.matcher import Matcher
from personae.grammar.schema.walk import subschemas
from personae.grammar.spec import GrammarSpec
from personae.grammar.vocabulary import Vocabulary

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"

# How many properties are tried when searching for an accepted order of an instance's properties. A check of
# each token takes milliseconds.
MAX_ATTEMPTS = 20_000
MAX_CHECKED_ATTEMPTS = 200

Encode = Callable[[str], list[int]]


@dataclass(slots=True)
class MaskbenchReport:
    """The results of a suite. False accepts and rejects are (case, instance) names."""

    strict: bool
    schemas: int = 0
    compiled: int = 0
    checked: int = 0  # of these, by checks of each token (grammar/checked/)
    instances: int = 0
    other_order: int = 0
    false_accepts: list[tuple[str, str]] = field(default_factory=list)
    false_rejects: list[tuple[str, str]] = field(default_factory=list)
    refusals: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    mask_seconds: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The share of accepted schemas."""
        return self.compiled / max(1, self.schemas)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield (
            f"{'strict' if self.strict else 'not strict'}: {self.compiled} of {self.schemas} schemas taken "
            f"({100 * self.share:.1f} %), {self.checked} of them checked token by token, "
            f"{self.instances} instances"
        )
        yield f"compile, refusals included: {_quantiles(self.seconds)}"
        if self.mask_seconds:
            yield f"mask: {_quantiles(self.mask_seconds)}"
        for label, failures in (("accepts", self.false_accepts), ("rejects", self.false_rejects)):
            schemas = len({case for case, _ in failures})
            yield f"false {label}: {len(failures)} instances of {schemas} schemas"
            yield from (f"    {case}: {instance}" for case, instance in failures[:20])
        yield f"accepted in another order of properties: {self.other_order} instances"
        for reason, count in Counter(self.refusals.values()).most_common():
            yield f"{count:6} refused: {reason}"


def _quantiles(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (1e3 * ordered[int(quantile * len(ordered))] for quantile in (0.5, 0.99))
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms, most {1e3 * ordered[-1]:.2f} ms"


def run(
    cases: Iterable[SchemaCase],
    compiler: GrammarCompiler,
    encode: Encode,
    *,
    strict: bool,
    masks: bool = False,
    any_order: bool = False,
) -> MaskbenchReport:
    """Compile every case. `encode` tokenizes an instance's text.

    With `masks`, the mask before each token of the valid instances is filled and timed. With `any_order`,
    properties may come in any order, and every instance with an object is also tried with its properties
    reversed.
    """
    report = MaskbenchReport(strict)
    for case in cases:
        report.schemas += 1
        started = time.perf_counter()
        try:
            spec = GrammarSpec("json_schema", json.dumps(case.schema), strict, any_order=any_order)
            grammar = compiler.compile(spec)
        except (GrammarError, Overloaded) as refusal:
            report.refusals[case.name] = _reason(refusal)
            continue
        finally:
            report.seconds.append(time.perf_counter() - started)
        report.compiled += 1
        if grammar.remote:  # the same with its masks made here
            report.checked += 1
            grammar = compiler.compile_here(msgspec.structs.replace(spec, checked=True))
        assert isinstance(grammar, BoundGrammar)
        for name, instance, valid in both_orders(case.instances) if any_order else case.instances:
            report.instances += 1
            accepted = _accepts(grammar, compiler.vocabulary, encode, instance)
            if masks and accepted and valid:
                report.mask_seconds += _time_masks(grammar, compiler.vocabulary, encode, instance)
            if accepted and not valid:
                report.false_accepts.append((case.name, name))
            elif valid and not accepted:
                sorted_instance = _sorted(instance, _places_of_names(case.schema))
                if _accepts_reordered(grammar, compiler.vocabulary, encode, sorted_instance):
                    report.other_order += 1
                else:
                    report.false_rejects.append((case.name, name))
    return report


def both_orders(instances: Iterable[tuple[str, Any, bool]]) -> Iterator[tuple[str, Any, bool]]:
    """The instances as they are, and those that have objects with the properties in reversed order."""
    for name, instance, valid in instances:
        yield name, instance, valid
        turned = _reversed(instance)
        if json.dumps(turned) != json.dumps(instance):
            yield f"{name} (reversed)", turned, valid


def _reversed(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _reversed(value[name]) for name in reversed(value)}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


def _places_of_names(schema: Any) -> dict[str, int]:
    """Where the schema first lists each property."""
    listed = (name for one, _ in subschemas(schema) for name in one.get("properties") or ())
    return {name: place for place, name in enumerate(dict.fromkeys(listed))}


def _sorted(value: Any, places: dict[str, int]) -> Any:
    """The value with properties in the schema's order, as far as it is known: the search begins with it."""
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: places.get(name, len(places)))
        return {name: _sorted(value[name], places) for name in names}
    return [_sorted(item, places) for item in value] if isinstance(value, list) else value


def _reason(refusal: GrammarError | Overloaded) -> str:
    """The keyword of a rejection, or the first words of its message."""
    words = refusal.message.split("'")
    return words[1] if refusal.message.startswith("The keyword") else refusal.message[:80]


def _accepts(grammar: BoundGrammar, vocabulary: Vocabulary, encode: Encode, instance: Any) -> bool:
    text = json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
    return _follows(grammar.matcher(), vocabulary, (*encode(text), vocabulary.stop_ids[0]))


def _follows(matcher: Matcher, vocabulary: Vocabulary, tokens: Iterable[int]) -> bool:
    """Whether the tokens are accepted in turn, with a mask before each, as the engine makes it: the grammar
    library limits what it does between two masks."""
    bitmask = np.full((1, words_of(vocabulary.size)), -1, np.int32)
    for token in tokens:
        if not isinstance(matcher, CheckedMatcher):
            matcher.fill(bitmask, 0)
        if not matcher.accept(token):
            return False
    return True


def _time_masks(grammar: BoundGrammar, vocabulary: Vocabulary, encode: Encode, instance: Any) -> list[float]:
    """Seconds to fill each mask along an instance."""
    matcher = grammar.matcher()
    bitmask = np.full((1, words_of(vocabulary.size)), -1, np.int32)
    seconds = []
    for token in encode(json.dumps(instance, ensure_ascii=False, separators=(",", ":"))):
        started = time.perf_counter()
        matcher.fill(bitmask, 0)
        seconds.append(time.perf_counter() - started)
        matcher.accept(token)
    return seconds


def _accepts_reordered(grammar: BoundGrammar, vocabulary: Vocabulary, encode: Encode, instance: Any) -> bool:
    """Whether the instance is accepted with the properties of its objects in another order."""
    attempts = iter(range(MAX_CHECKED_ATTEMPTS if isinstance(grammar, CheckedGrammar) else MAX_ATTEMPTS))

    def write(matcher: Matcher, text: str) -> Matcher | None:
        fork = matcher.fork()
        return fork if _follows(fork, vocabulary, encode(text)) else None

    def written(matcher: Matcher, value: Any) -> Iterator[Matcher]:
        """The states in which `value` has been written after `matcher`."""
        if isinstance(value, dict):
            yield from members(matcher, value, "{")
        elif isinstance(value, list):
            yield from items(matcher, value, "[")
        elif state := write(matcher, json.dumps(value, ensure_ascii=False)):
            yield state

    def members(matcher: Matcher, rest: dict[str, Any], opening: str) -> Iterator[Matcher]:
        for name in rest:
            if next(attempts, None) is None:
                return
            if state := write(matcher, opening + json.dumps(name, ensure_ascii=False) + ":"):
                others = {other: value for other, value in rest.items() if other != name}
                for after in written(state, rest[name]):
                    yield from members(after, others, ",")
        if not rest and (state := write(matcher, "}" if opening == "," else "{}")):
            yield state

    def items(matcher: Matcher, rest: list[Any], opening: str) -> Iterator[Matcher]:
        if not rest and (state := write(matcher, "]" if opening == "," else "[]")):
            yield state
        if rest and (state := write(matcher, opening)):
            for after in written(state, rest[0]):
                yield from items(after, rest[1:], ",")

    return any(state.accept(vocabulary.stop_ids[0]) for state in written(grammar.matcher(), instance))


def byte_vocabulary(words: Sequence[str] = ()) -> Vocabulary:
    """One token per byte, one per word, and a stop token: enough to test what a grammar accepts."""
    tokens = (*(bytes([byte]) for byte in range(256)), *(word.encode() for word in words), b"")
    return Vocabulary(tokens, (len(tokens) - 1,), {})


def read_tokenizer(path: Path) -> Tokenizer:
    """From a `tokenizer.json`, or from Mistral's `tekken.json`, which transformers converts.

    Older files of the latter kind do not name their special tokens; ids for them are reserved at the
    beginning.
    """
    if "tekken" not in path.name:
        return Tokenizer.from_file(str(path))
    from transformers.integrations.mistral.tokenizer import MistralConverter

    with TemporaryDirectory() as folder:
        named = Path(folder) / path.name
        named.write_text(json.dumps({"special_tokens": [], **json.loads(path.read_text())}))
        converted: Tokenizer = MistralConverter(str(named)).converted()
        return converted


def main(
    folder: Path = DATA / "jsonschemabench",
    suite: Path = DATA / "json-schema-test-suite",
    every: int = 1,
    tokenizer: Path | None = None,
    masks: bool = False,
    any_order: bool = False,
) -> None:
    """Run MaskBench, strict and not, and the JSON-Schema-Test-Suite, and print their reports."""
    if not folder.is_dir() and not suite.is_dir():
        raise typer.BadParameter(f"Neither {folder} nor {suite} is there; --folder and --suite name others.")
    vocabulary, encode = byte_vocabulary(), lambda text: list(text.encode())
    if tokenizer is not None:
        loaded = read_tokenizer(tokenizer)
        size = loaded.get_vocab_size()
        vocabulary = Vocabulary.from_tokenizer_json(loaded.to_str(), size, [size - 1])
        encode = lambda text: loaded.encode(text, add_special_tokens=False).ids  # noqa: E731 - one of two
    compiler = GrammarCompiler(vocabulary)

    def report(cases: list[SchemaCase], *, strict: bool) -> None:
        shown = track(cases, transient=True, disable=not sys.stderr.isatty())
        found = run(shown, compiler, encode, strict=strict, masks=masks, any_order=any_order)
        print("\n".join(found.lines()))

    if folder.is_dir():
        report(read_schemas(folder, every), strict=True)
        if not any_order:
            report(read_schemas(folder, every), strict=False)
    if suite.is_dir():
        for draft, cases in read_drafts(suite):
            print(f"JSON-Schema-Test-Suite, {draft}")
            report(cases, strict=True)
    compiler.close()


if __name__ == "__main__":
    typer.run(main)
