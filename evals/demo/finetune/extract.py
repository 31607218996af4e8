"""Text and a JSON Schema to JSON. The documents stand in extract.txt; others are made of a thing's properties.

A document belongs to the held-out split when the CRC-32 of its name is divisible by six, as a tool does.
"""

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from personae.evals.demo.finetune.made import PROPERTIES, THINGS
from personae.evals.demo.finetune.scene import Scene, Turn
from personae.evals.demo.finetune.tools import held_out, schema_of, value_of
from personae.evals.demo.finetune.values import Value, integer, joined, word

_SLOT = re.compile(r"\{(\w+)\}")
ASKS = (
    "Extract the data from the text as JSON of this schema:\n{schema}\n\nText: {text}",
    "Fill this JSON Schema from the text below.\n{schema}\n\n{text}",
    "{schema}\n\nWrite what the following text says as JSON of the schema above: {text}",
    "Schema: {schema}\nText: {text}\nReturn the JSON object.",
    "Read the text and answer with JSON only, in the form of {schema}.\n\nText: {text}",
)
FILLERS = (
    "Thank you for reading.", "More will follow soon.", "That is all for today.", "Please keep this for your records.",
    "It rained all day.", "We hope to hear from you.", "Nobody expected that.", "The rest is as usual.",
)  # fmt: skip


class Document(NamedTuple):
    """A kind of document: its fields, and groups of ways to say them."""

    name: str
    fields: dict[str, str]
    groups: list[list[str]]


@cache
def written_documents() -> tuple[Document, ...]:
    """The documents written by hand."""
    lines = (Path(__file__).parent / "extract.txt").read_text(encoding="utf-8").splitlines()
    return tuple(_document(line) for line in lines if line and not line.startswith("#"))


def _document(line: str) -> Document:
    name, fields, groups = line.split(" | ")
    pairs = [field.split(":", 1) for field in fields.split("; ")]
    return Document(name, dict(pairs), [group.split(" || ") for group in groups.split(" && ")])


def _made(rng: random.Random, *, test: bool) -> Document:
    thing = rng.choice([thing for thing in THINGS if held_out(thing) is test])
    names = rng.sample(list(PROPERTIES), rng.randint(3, 6))
    groups = []
    for index, name in enumerate(names):
        words, slot = name.replace("_", " "), "{" + name + "}"
        ways = [f"The {words} is {slot}.", f"{words.capitalize()}: {slot}.", f"It has {slot} as its {words}."]
        if index == 0:
            ways = [f"The {words} of the {thing} is {slot}.", f"This {thing} has the {words} {slot}."]
        elif rng.random() < 0.25:
            ways = ["?" + way for way in ways]
        groups.append(ways)
    return Document(thing.replace(" ", "_"), {name: PROPERTIES[name] for name in names}, groups)


def _value(kind: str, rng: random.Random) -> Value:
    if kind != "items":
        return value_of(kind, rng)
    parts = []
    for _ in range(rng.choice((1, 2, 2, 3))):
        count, product, price = integer(rng, 1, 9), word(rng, "product"), rng.randint(3, 300)
        said = rng.choice(
            (f"{count.said} {product.said} at ${price} each", f"{count.said} x {product.said} (${price})")
        )
        parts.append(Value(said, {"product": product.json, "quantity": count.json, "unit_price": price}))
    return Value(joined(rng, [part.said for part in parts]), [part.json for part in parts])


def _schema(document: Document, nullable: set[str], rng: random.Random) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for name, kind in document.fields.items():
        if kind == "items":
            fields = {"product": "string", "quantity": "integer", "unit_price": "number"}
            inner = {key: {"type": value} for key, value in fields.items()}
            one = {
                "type": "object",
                "properties": inner,
                "required": list(fields),
                "additionalProperties": False,
            }
            properties[name] = {"type": "array", "items": one}
            continue
        properties[name] = schema_of(kind)
        if kind == "date":
            properties[name]["format"] = "date"
        if kind == "time":
            properties[name]["description"] = "HH:MM"
        if name in nullable:
            schema = properties[name]
            if "enum" in schema:
                schema["enum"] = [*schema["enum"], None]
            schema["type"] = [schema["type"], "null"]
    keys = list(properties)
    if rng.random() < 0.3:
        rng.shuffle(keys)
    return {
        "type": "object",
        "properties": {key: properties[key] for key in keys},
        "required": keys,
        "additionalProperties": False,
    }


def scene(rng: random.Random, *, test: bool, turns: int) -> Scene:
    """One schema and several texts."""
    if rng.random() < 0.3:
        document = _made(rng, test=test)
    else:
        document = rng.choice([one for one in written_documents() if held_out(one.name) is test])
    maybe = [group for group in document.groups if group[0].startswith("?")]
    nullable = {name for group in maybe for name in _SLOT.findall(group[0]) if name in document.fields}
    sure = {n for g in document.groups if not g[0].startswith("?") for n in _SLOT.findall(g[0])}
    schema = _schema(document, nullable - sure, rng)
    ask = rng.choice(ASKS)
    shown = json.dumps(schema, ensure_ascii=False)
    made = []
    for _ in range(turns):
        text, record = _text(document, rng)
        answer = {key: record[key] for key in schema["properties"]}
        user = ask.replace("{schema}", shown).replace("{text}", text)
        made.append(Turn(user, json.dumps(answer, ensure_ascii=False), facts=answer))
    return Scene("extract", [], None, made, schema)


def _text(document: Document, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A text, and what it says: null for what is absent, false for what is not said to be so."""
    drawn = {name: _value(kind, rng) for name, kind in document.fields.items()}
    record: dict[str, Any] = {
        name: False if kind == "bool" else None for name, kind in document.fields.items()
    }
    sentences = []
    for group in document.groups:
        way = rng.choice(group)
        if way.startswith("?") and rng.random() < 0.25:
            continue
        if way.startswith("+"):
            name, _, way = way[1:].partition(" ")
            if rng.random() < 0.5:
                continue
            record[name] = True
        way = way.removeprefix("?")
        record |= {name: drawn[name].json for name in _SLOT.findall(way)}
        text = _SLOT.sub(lambda found: drawn[found[1]].said, way)
        sentences.append(text[:1].upper() + text[1:])
    if rng.random() < 0.3:
        rest = sentences[1:]
        rng.shuffle(rest)
        sentences[1:] = rest
    if rng.random() < 0.4:
        sentences.insert(rng.randint(1, len(sentences)), rng.choice(FILLERS))
    return " ".join(sentences), record
