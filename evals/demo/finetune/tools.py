"""Conversations about tools: one call, several, or none where none fits. The tools stand in tools.txt.

A tool belongs to the held-out split when the CRC-32 of its name is divisible by six. Besides those written by
hand there are made ones: a verb, a thing and its properties.
"""

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from personae.evals.demo.finetune import values as v
from personae.evals.demo.finetune.made import made_tool
from personae.evals.demo.finetune.scene import Scene, Turn
from personae.evals.demo.finetune.talk import (
    FIXED_ANSWERS,
    GENERAL,
    NOISE,
    NOTHING_FITS,
    OPENERS,
    THANKS,
)

_SEGMENT = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: `kind` says which values it takes."""

    name: str
    kind: str
    about: str
    required: bool
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Spec:
    """A tool and the ways to ask for it."""

    domain: str
    name: str
    about: str
    parameters: tuple[Parameter, ...]
    questions: tuple[str, ...]


@dataclass(slots=True)
class Offered:
    """A tool as one conversation shows it: its names and formats are its own."""

    spec: Spec
    schema: dict[str, Any]
    names: dict[str, str]
    dates: str


def held_out(name: str) -> bool:
    """Whether what is called so belongs to the test split."""
    return zlib.crc32(name.encode()) % 6 == 0


@cache
def written_tools() -> tuple[Spec, ...]:
    """The tools written by hand."""
    lines = (Path(__file__).parent / "tools.txt").read_text(encoding="utf-8").splitlines()
    return tuple(_spec(line) for line in lines if line and not line.startswith("#"))


def _spec(line: str) -> Spec:
    domain, name, about, parameters, questions = line.split(" | ")
    return Spec(
        domain,
        name,
        about,
        tuple(_parameter(text) for text in parameters.split("; ")),
        tuple(question.strip() for question in questions.split(" || ")),
    )


def _parameter(text: str) -> Parameter:
    name, kind, about = text.split(":", 2)
    about, _, default = about.partition("=")
    return Parameter(name.lstrip("?"), kind, about, not text.startswith("?"), default or None)


def value_of(kind: str, rng: random.Random) -> v.Value:
    """A value of a kind."""
    if kind.startswith("list("):
        parts = [value_of(kind[5:-1], rng) for _ in range(rng.choice((2, 2, 3, 3, 4)))]
        return v.Value(v.joined(rng, [part.said for part in parts]), [part.json for part in parts])
    if kind.startswith("enum("):
        option = rng.choice(kind[5:-1].split(","))
        return v.Value(option.replace("_", " "), option)
    if found := re.fullmatch(r"(int|num)\((-?\d+)-(-?\d+)\)", kind):
        low, high = int(found[2]), int(found[3])
        return v.integer(rng, low, high) if found[1] == "int" else v.decimal(rng, low, high)
    if kind == "bool":
        return v.Value("", True)
    if kind == "money0":
        value = rng.choice((rng.randint(2, 99), rng.randint(1, 90) * 50))
        return v.Value(str(value), value)
    if kind == "matrix":
        rows = [[rng.randint(-9, 9) for _ in range(2)] for _ in range(2)]
        return v.Value(str(rows), rows)
    if kind in v.KINDS:
        return v.KINDS[kind][1](rng)
    return v.word(rng, kind)


def schema_of(kind: str) -> dict[str, Any]:
    """The JSON Schema of a kind."""
    if kind.startswith("list("):
        return {"type": "array", "items": schema_of(kind[5:-1])}
    if kind.startswith("enum("):
        return {"type": "string", "enum": kind[5:-1].split(",")}
    if kind.startswith("int("):
        return {"type": "integer"}
    if kind.startswith("num(") or kind == "money0":
        return {"type": "number"}
    if kind == "bool":
        return {"type": "boolean"}
    if kind == "matrix":
        return {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}}
    if kind == "coordinates":
        number = {"type": "number"}
        return {
            "type": "object",
            "properties": {"latitude": number, "longitude": number},
            "required": ["latitude", "longitude"],
        }
    return {"type": v.KINDS[kind][0] if kind in v.KINDS else "string"}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def offer(spec: Spec, rng: random.Random) -> Offered:
    """The tool with names, descriptions and optional parameters as one conversation shows them."""
    style = rng.choices(("snake", "camel", "pascal", "domain"), (70, 12, 6, 12))[0]
    name = {"camel": _camel(spec.name), "pascal": _camel(spec.name)[:1].upper() + _camel(spec.name)[1:]}.get(
        style, f"{spec.domain}_{spec.name}" if style == "domain" else spec.name
    )
    dates = rng.choices(("%Y-%m-%d", "%m/%d/%Y", "%d.%m.%Y"), (80, 12, 8))[0]
    names = {p.name: _camel(p.name) if style == "camel" else p.name for p in spec.parameters}
    properties: dict[str, Any] = {}
    for p in spec.parameters:
        properties[names[p.name]] = {**schema_of(p.kind), **_described(p, dates, rng)}
    about = spec.about
    if rng.random() < 0.12:
        about += " Note that the provided function is in Python 3 syntax."
    schema: dict[str, Any] = {
        "name": name,
        "description": about,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": [names[p.name] for p in spec.parameters if p.required],
        },
    }
    return Offered(spec, {"type": "function", "function": schema}, names, dates)


def _described(p: Parameter, dates: str, rng: random.Random) -> dict[str, Any]:
    about = p.about
    if p.kind == "date":
        shown = {"%Y-%m-%d": "YYYY-MM-DD", "%m/%d/%Y": "MM/DD/YYYY", "%d.%m.%Y": "DD.MM.YYYY"}[dates]
        about += rng.choice((f" in the format {shown}", f" ({shown})", f", {shown}"))
    elif p.kind in v.FORMATS:
        about += " " + rng.choice(v.FORMATS[p.kind])
    elif rng.random() < 0.12 and not p.kind.startswith(("enum", "bool", "list")):
        about += f", e.g. {value_of(p.kind, rng).json}"
    about = rng.choice(
        (
            about + ".",
            about + ".",
            about,
            about.lower(),
            "The " + about.removeprefix("The ")[:1].lower() + about.removeprefix("The ")[1:] + ".",
        )
    )
    extra: dict[str, Any] = {"description": about}
    if not p.required and p.default is not None:
        kind = p.kind.partition("(")[0]
        known: Any = p.default
        if kind in ("int", "num"):
            known = float(p.default) if "." in p.default else int(p.default)
        if kind == "bool":
            known = p.default == "true"
        if rng.random() < 0.5:
            extra["default"] = known
        if rng.random() < 0.6:
            extra["description"] = about.rstrip(".") + f". Default is {p.default}."
    elif not p.required and rng.random() < 0.3:
        extra["description"] = about.rstrip(".") + rng.choice((". Optional.", " (optional)."))
    return extra


def ask(tool: Offered, rng: random.Random, question: str | None = None) -> tuple[str, dict[str, Any]]:
    """A question and the call that it asks for."""
    template = question or rng.choice(tool.spec.questions)
    drawn = {p.name: value_of(p.kind, rng) for p in tool.spec.parameters}
    required = {p.name for p in tool.spec.parameters if p.required}
    share, used = rng.choice((0.0, 0.35, 0.7)), set(required)

    def segment(found: re.Match[str]) -> str:
        text = found[1]
        if text.startswith("+"):
            name, _, words = text[1:].partition(" ")
            if rng.random() >= share:
                return ""
            used.add(name)
            return words
        if rng.random() >= share:
            return "?" if text.startswith("?") else ""
        used.update(_SLOT.findall(text))
        return text

    text = _SEGMENT.sub(segment, template)
    used |= set(_SLOT.findall(text))
    text = _SLOT.sub(lambda found: drawn[found[1]].said, text)
    if any("{" + name + "}" not in template for name in required):
        # the question leaves a required value out: every template must say them all
        missing = [name for name in sorted(required) if "{" + name + "}" not in template]
        text += " " + ", ".join(f"{name.replace('_', ' ')}: {drawn[name].said}" for name in missing) + "."
    arguments = {
        tool.names[p.name]: argument(tool, p, drawn[p.name]) for p in tool.spec.parameters if p.name in used
    }
    return text, {"name": tool.schema["function"]["name"], "arguments": arguments}


def argument(tool: Offered, p: Parameter, value: v.Value) -> Any:
    """A value as the tool's format has it."""
    if p.kind == "date" and tool.dates != "%Y-%m-%d":
        year, month, day = value.json.split("-")
        return tool.dates.replace("%Y", year).replace("%m", month).replace("%d", day)
    return value.json


def _polished(text: str, rng: random.Random) -> str:
    """With what people say around a question."""
    if rng.random() < 0.25:
        text = f"{rng.choice(OPENERS)} {text}"
    if rng.random() < 0.1:
        text = f"{rng.choice(NOISE)} {text}"
    if rng.random() < 0.1:
        text = f"{text} {rng.choice(THANKS)}"
    return text[:1].upper() + text[1:] if rng.random() < 0.8 else text


def _several(tool: Offered, rng: random.Random) -> tuple[str, list[dict[str, Any]]] | None:
    """One question for several calls of a tool."""
    count = rng.choice((2, 2, 2, 3))
    template = rng.choice(tool.spec.questions)
    bare = _SEGMENT.sub(lambda found: "?" if found[1].startswith("?") else "", template)
    slots = _SLOT.findall(bare)
    required = [p for p in tool.spec.parameters if p.required]
    if len(required) == 1 and slots == [required[0].name] and not required[0].kind.startswith("list"):
        p = required[0]
        drawn = [value_of(p.kind, rng) for _ in range(count)]
        if len({value.said for value in drawn}) == count:
            text = bare.replace("{" + p.name + "}", v.joined(rng, [value.said for value in drawn]))
            name = tool.schema["function"]["name"]
            key = tool.names[p.name]
            return text, [{"name": name, "arguments": {key: argument(tool, p, value)}} for value in drawn]
    asked = [ask(tool, rng, template) for _ in range(count)]
    return _chained([text for text, _ in asked], rng), [call for _, call in asked]


def _chained(texts: Sequence[str], rng: random.Random) -> str:
    word = rng.choice(("Also: ", "And ", "Then ", "", "Next, ", "After that: "))
    rest = [
        word + (text[:1].lower() + text[1:] if word.endswith(" ") and word != "Also: " else text)
        for text in texts[1:]
    ]
    return " ".join(text if text[-1] in ".?!" else text + "." for text in (texts[0], *rest))


def specs(rng: random.Random, count: int, *, test: bool) -> list[Spec]:
    """Tools of a split, of different names. Some come from one domain, so that they are alike."""
    pool = [spec for spec in written_tools() if held_out(spec.name) is test]
    found: dict[str, Spec] = {}
    near = rng.random() < 0.4
    domain = rng.choice(pool).domain
    while len(found) < count:
        if rng.random() < 0.35:
            spec = made_tool(rng, test, held_out)
        else:
            same = [spec for spec in pool if spec.domain == domain and spec.name not in found]
            spec = rng.choice(same if near and same else pool)
        found.setdefault(spec.name, spec)
    return list(found.values())


def scene(rng: random.Random, *, test: bool, turns: int) -> Scene:
    """A list of tools, and questions, each of which is a conversation of its own."""
    count = rng.choices((1, 2, 3, 4, 5, 6, 7, 8), (36, 20, 14, 10, 7, 5, 4, 4))[0]
    tools = [offer(spec, rng) for spec in specs(rng, count, test=test)]
    system = rng.choice(FIXED_ANSWERS) if rng.random() < 0.08 else None
    made = [_turn(tools, rng, test=test) for _ in range(turns)]
    return Scene("tools", [tool.schema for tool in tools], system, made)


def _turn(tools: list[Offered], rng: random.Random, *, test: bool) -> Turn:
    kind = rng.choices(("one", "same", "two", "none"), (58, 9, 9, 24))[0]
    if kind == "none":
        return no_call(tools, rng, test=test)
    if kind == "two" and len(tools) > 1:
        asked = [ask(tool, rng) for tool in rng.sample(tools, 2)]
        text, calls = _chained([text for text, _ in asked], rng), [call for _, call in asked]
    elif kind == "same" and (several := _several(rng.choice(tools), rng)) is not None:
        text, calls = several
    else:
        kind = "one"
        text, call = ask(rng.choice(tools), rng)
        calls = [call]
    return Turn(_polished(text, rng), "", calls, kind)


def any_call(tools: list[Offered], rng: random.Random, *, test: bool) -> Turn:
    """A question that needs one call or several."""
    while not (turn := _turn(tools, rng, test=test)).calls:
        pass
    return turn


def no_call(tools: list[Offered], rng: random.Random, *, test: bool) -> Turn:
    """A question that no tool fits, or that lacks what the tool needs."""
    draw = rng.random()
    if draw < 0.2:
        question, answer = rng.choice(GENERAL)
        return Turn(question, answer, [], "none")
    if draw < 0.32:
        tool = rng.choice(tools)
        required = [p for p in tool.spec.parameters if p.required]
        if required and not tool.spec.about.startswith(("List", "Show")):
            about = tool.spec.about.rstrip(".")
            text = rng.choice(("Can you {}?", "Please {}.", "I want you to {}.", "{} for me.")).format(
                about[:1].lower() + about[1:]
            )
            lacks = v.joined(rng, [p.name.replace("_", " ") for p in required])
            return Turn(_polished(text, rng), f"Please tell me the {lacks}.", [], "none")
    names = {tool.spec.name for tool in tools}
    pool = [spec for spec in written_tools() if held_out(spec.name) is test and spec.name not in names]
    domains = {tool.spec.domain for tool in tools}
    near = [spec for spec in pool if spec.domain in domains]
    chosen = rng.choice(near) if near and rng.random() < 0.4 else rng.choice(pool)
    text, _ = ask(offer(chosen, rng), rng)
    return Turn(_polished(text, rng), rng.choice(NOTHING_FITS), [], "none")
