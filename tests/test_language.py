"""Names are the field's standard words: the metaphors of the first version do not come back."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("actors", "api", "engine", "evals", "grammar", "integrations", "kernels", "lora", "tests")

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")


def listed(text: str) -> frozenset[str]:
    return frozenset(text.split())


# No name may have one of these words, and no sentence that names a test.
METAPHORS = listed("""
    arena blueprint crowd crowded crowds curtain fallen objection outlook prospectus roster seat
    seated seats settlement siege sitting sittings slips spoilt troupe untold
""")
# No class, function or module may have one of these words. In the sentences of tests they are plain English.
PRIVATE_WORDS = METAPHORS | listed("""
    affine bell beside company course desk door elsewhere house meanwhile shelf sketch slip told tour
""")
# No class or module may have one of these as its whole name. Within a longer name they are plain words.
WHOLE_NAMES = listed("""
    alone arrival asks back back_end books branch cast closing collector container extras flight form
    frame front give_way growth holdings host jump letter life mark needed noise outline pace place
    raise_curtain reach reading recall returned room script shares shut spent stage turns waiting_room words
    yield
""")
# No module may have one of these names. A class may: a `Choice` is one of several answers.
MODULES = listed("choice")
# Classes of the core of which there are two by one name. A name leaves the list with one of its meanings.
CORE = ("actors", "api", "engine", "grammar", "kernels", "lora")
TWO_MEANINGS = listed("""
    Conversation Copies Driver End Expected Group Head Keep Launch Layout Load LoadAdapter Measured
    Metadata Outcome Placed Reader Refusal Release Repeat Replica Running Session Spawned Text Tokens Turn
""")
# These have one meaning in all that is not a test: as a class, and as another name of a type.
ONE_MEANING = listed("""
    AdapterSource Asked Automaton Begin Bound Bucket Choice Compiled Drain Forward Identity LoraContext Part
    Refused Replay Report Row Serving Span Worker
""")
# No docstring or comment of these folders may have one of these words or phrases: they read like riddles.
# To hold another folder to this, rewrite its sentences and add it.
PLAIN_FOLDERS = ("actors", "api", "engine", "evals", "grammar", "kernels", "lora")
RIDDLES = listed("""
    aboard arena arenas beside crowded outlook seat seated seats sitting troupe untold
    whoever whomever
""")
RIDDLE = re.compile(
    r"\b(gives? way|sits? (the step |it )?out|sat (it )?out|(is|are) told|that there (is|are) (no|not))\b"
)
# A list of words, and an OpenTelemetry collector.
PLAIN = frozenset({"evals/demo/words.py: words", "tests/api/telemetry/test_otel.py: Collector"})

Name = tuple[str, str]  # its kind, and itself


@cache
def python_files() -> list[Path]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 400
    return sorted(path for path in files if "node_modules" not in path.parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def names() -> dict[Path, list[Name]]:
    """The file's name and those of all its classes and functions."""
    return {path: list(_names(path)) for path in python_files()}


def _names(path: Path) -> Iterator[Name]:
    stem = path.parent.name if path.stem == "__init__" else path.stem
    yield "module", stem.removeprefix("test_")
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ClassDef):
            yield "class", node.name
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield ("test" if node.name.startswith("test_") else "function"), node.name


def words(name: str) -> list[str]:
    """`_WaitingRoom` and `waiting_room` have the same."""
    return [word.lower() for word in WORD.findall(name)]


def is_private(kind: str, name: str) -> bool:
    parts = words(name)
    if kind == "test":
        return not METAPHORS.isdisjoint(parts)
    if not PRIVATE_WORDS.isdisjoint(parts):
        return True
    whole = "_".join(parts)
    return (kind in ("class", "module") and whole in WHOLE_NAMES) or (kind == "module" and whole in MODULES)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_class_function_or_module_has_a_name_of_the_private_language(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, named in names().items()
        if path.relative_to(ROOT).parts[0] == folder
        for kind, name in named
        if is_private(kind, name)
    ]
    assert not set(found) - PLAIN, "\n".join(found)


def test_every_exception_is_still_needed() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, named in names().items()
        for kind, name in named
        if is_private(kind, name)
    }
    assert found >= PLAIN


def test_a_class_of_the_core_has_a_name_of_its_own() -> None:
    found = Counter(
        name
        for path, named in names().items()
        if path.relative_to(ROOT).parts[0] in CORE
        for kind, name in named
        if kind == "class" and not name.startswith("_")
    )
    assert {name for name, count in found.items() if count > 1} == TWO_MEANINGS


def types_of(path: Path) -> Iterator[str]:
    """The classes of a file, and the other names that it gives to types."""
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_a_word_with_one_meaning_names_one_type() -> None:
    files = [path for path in python_files() if path.relative_to(ROOT).parts[0] != "tests"]
    found = Counter(name for path in files for name in types_of(path) if name in ONE_MEANING)
    assert found == dict.fromkeys(ONE_MEANING, 1)


def parameters_and_attributes(path: Path) -> Iterator[str]:
    """What a file's functions take, and what its objects have."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.ClassDef):
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            yield from (field.id for field in fields if isinstance(field, ast.Name))


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "tests"])
def test_no_parameter_or_attribute_has_a_name_of_the_private_language(folder: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in python_files()
        if path.relative_to(ROOT).parts[0] == folder
        for name in parameters_and_attributes(path)
        if not PRIVATE_WORDS.isdisjoint(words(name))
    }
    assert not found, "\n".join(sorted(found))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a file, each with its line."""
    source = path.read_text(encoding="utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(parsed(path)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, " ".join(node.value.value.split())


def riddles(text: str) -> set[str]:
    """What a sentence has of the private language."""
    plain = text.lower()
    return RIDDLES.intersection(re.findall(r"[a-z]+", plain)) | {match[0] for match in RIDDLE.finditer(plain)}


@pytest.mark.parametrize("folder", PLAIN_FOLDERS)
def test_no_docstring_or_comment_is_in_the_private_language(folder: str) -> None:
    files = [path for path in python_files() if path.relative_to(ROOT).parts[0] == folder]
    assert len(files) > 20
    found = [
        f"{path.relative_to(ROOT)}:{line}: {', '.join(sorted(words))}"
        for path in files
        for line, text in prose(path)
        if (words := riddles(text))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Work that gives way to others.", {"gives way"}),
        ("# rows that sit the step out, beside the rest", {"sit the step out", "beside"}),
        ("A format that there is not is told.", {"that there is not", "is told"}),
        ("An unknown `--tool-format` is rejected before the model loads.", set()),
        ("The released slots are besides the point.", set()),
    ],
)
def test_a_sentence_of_the_private_language_is_found(text: str, found: set[str]) -> None:
    assert riddles(text) == found


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("class", "Roster"),
        ("class", "_WaitingRoom"),
        ("class", "Prospectus"),
        ("class", "AdapterRoster"),
        ("class", "Outlook"),
        ("function", "end_sitting"),
        ("function", "told"),
        ("function", "run_beside"),
        ("module", "life"),
        ("module", "choice"),
        ("module", "raise_curtain"),
        ("test", "test_all_seats_are_taken"),
    ],
)
def test_a_name_of_the_private_language_is_found(kind: str, name: str) -> None:
    assert is_private(kind, name)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("class", "Release"),
        ("class", "LoadAdapter"),
        ("class", "MultipartForm"),
        ("class", "Lifetime"),
        ("class", "WaitingQueue"),
        ("class", "Choice"),
        ("function", "load"),
        ("function", "outdoor"),
        ("module", "placement"),
        ("test", "test_one_is_told_beside_the_other"),
    ],
)
def test_plain_words_are_allowed(kind: str, name: str) -> None:
    assert not is_private(kind, name)
