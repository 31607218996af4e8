"""Knows where sets are in an answer: which schemas may apply to JSON, to a property and to an item."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from personae.grammar.backend import CompiledGrammar
from personae.grammar.schema.walk import DISTINCT, NAMES, SET, subschemas, target
from personae.grammar.tracked.distinct import ItemGrammar
from personae.grammar.tracked.listed_names import ListedNames, beginning
from personae.grammar.tracked.support import Untracked

Nodes = tuple[dict[str, Any], ...]
_ANY_NAME = "\0"  # one that is not listed
_MOST_PLACES = 5_000

CompileItems = Callable[[dict[str, Any], Any, bool], CompiledGrammar]
"""Compiles the grammar of an item, given the document, the item's schema, and whether properties come in any
order."""


class Thought(msgspec.Struct, frozen=True):
    """How an answer may begin: reasoning up to `close`. `open` opens it, unless it is empty."""

    open: str
    close: str


class Places(msgspec.Struct, frozen=True):
    """Where JSON is in an answer: after which texts, and by which schemas. `any_order`: whether properties
    come in any order."""

    schemas: tuple[tuple[str, dict[str, Any]], ...]
    thought: Thought | None = None
    any_order: bool = False


class Reader:
    """Finds the schemas of sets. Thread-safe."""

    def __init__(self, places: Places, compile_items: CompileItems) -> None:
        self._compile_items = compile_items
        self._any_order = places.any_order
        self._grammars: dict[int, ItemGrammar] = {}
        self._children: dict[tuple[tuple[int, ...], str | None], Nodes] = {}
        self._documents: dict[int, dict[str, Any]] = {}
        self._names: dict[tuple[int, ...], ListedNames] = {}
        self._roots = [
            (re.compile((_blanks(before) + r"\s*\Z").encode()), self._parts((document,), document))
            for before, document in places.schemas
        ]
        self._thought = places.thought
        self.distinct = False
        self.texts = any(f'"{SET}"' in json.dumps(document) for _, document in places.schemas)
        self.names = any(NAMES in json.dumps(document) for _, document in places.schemas)
        self.lists_names = any(_some_are_listed(document) for _, document in places.schemas)
        for (_, document), (_, nodes) in zip(places.schemas, self._roots, strict=True):
            if DISTINCT in json.dumps(document) or self.lists_names:
                self._prepare(nodes)

    def _prepare(self, nodes: Nodes) -> None:
        """Compile the items of all sets, and see that at no place an array may be a set or not. Raises
        Untracked."""
        seen: set[tuple[int, ...]] = set()
        unseen = [nodes]
        while unseen:
            here = unseen.pop()
            if tuple(map(id, here)) in seen:
                continue
            seen.add(tuple(map(id, here)))
            if len(seen) > _MOST_PLACES:
                raise Untracked("there are too many places where a set may be")
            self.names_of(here)
            if any(DISTINCT in node for node in here):
                self.distinct = True
                arrays = {json.dumps(node) for node in here if _may_be(node, "array")}
                if len(arrays) > 1:
                    raise Untracked("an array may be a set or another array")
                self.items(here)
            names = {name for node in here for name in node.get("properties", ())} | {_ANY_NAME}
            within = [self.children(here, name) for name in sorted(names)]
            unseen += [one for one in (*within, self.children(here, None)) if one]

    def names_of(self, nodes: Nodes) -> ListedNames | None:
        """The names of an object whose properties come once, if there are no others. Raises Untracked if it
        may be another object."""
        if not self.lists_names or not any(_is_listed(node) for node in nodes):
            return None
        place = tuple(map(id, nodes))
        if place not in self._names:
            objects = {json.dumps(node): node for node in nodes if _may_be(node, "object")}
            if len(objects) > 1:
                raise Untracked("an object of many properties may be another object")
            one = next(iter(objects.values()))
            names = (name for name, value in one.get("properties", {}).items() if value is not False)
            others = filter(None, map(beginning, one.get("patternProperties", {})))
            self._names[place] = ListedNames(
                frozenset(map(_as_text, names)), frozenset(map(_as_text, others))
            )
        return self._names[place]

    def items(self, nodes: Nodes) -> ItemGrammar | None:
        """The grammar of the items, if an array of one of these schemas is a set of values."""
        for node in nodes:
            if DISTINCT in node:
                if id(node) not in self._grammars:
                    document, items = self._documents[id(node)], node.get("items", True)
                    compiled = self._compile_items(document, items, self._any_order)
                    self._grammars[id(node)] = ItemGrammar(compiled, any_order=self._any_order)
                return self._grammars[id(node)]
        return None

    def root(self, text: bytes) -> Nodes:
        """The schemas that may apply to JSON that begins after `text`."""
        if self._thought is not None:
            opened = text.lstrip().startswith(self._thought.open.strip().encode())
            _, close, behind = text.partition(self._thought.close.encode())
            if opened and not close:
                return ()
            text = behind if opened else text
        return tuple(one for pattern, nodes in self._roots if pattern.search(text) for one in nodes)

    def _parts(self, nodes: Sequence[Any], document: dict[str, Any]) -> Nodes:
        """The given schemas, their parts, and the schemas that they refer to."""
        found: dict[int, dict[str, Any]] = {}
        unseen = list(nodes)
        while unseen:
            one = unseen.pop()
            if isinstance(one, dict) and id(one) not in found:
                found[id(one)] = one
                for keyword in ("anyOf", "allOf", "oneOf"):
                    unseen += one.get(keyword, ())
                if "$ref" in one:
                    unseen.append(target(document, one["$ref"]))
        self._documents |= dict.fromkeys(found, document)
        return tuple(found.values())

    def children(self, nodes: Nodes, key: str | None) -> Nodes:
        """The schemas that may apply to the value of a property, or to an item if `key` is None."""
        place = tuple(map(id, nodes)), key
        if place not in self._children:
            if len(self._children) > 4096:
                self._children.clear()
            found: dict[int, dict[str, Any]] = {}
            for node in nodes:
                parts = self._parts(_within(node, key), self._documents[id(node)])
                found |= {id(one): one for one in parts}
            self._children[place] = tuple(found.values())
        return self._children[place]


def _within(node: dict[str, Any], key: str | None) -> list[Any]:
    if key is None:
        items = node.get("items", True)
        return [*node.get("prefixItems", ()), *(items if isinstance(items, list) else [items])]
    listed = node.get("properties", {})
    if key in listed:
        return [listed[key], *node.get("patternProperties", {}).values()]
    return [node.get("additionalProperties", True), *node.get("patternProperties", {}).values()]


def _may_be(node: dict[str, Any], kind: str) -> bool:
    if "type" not in node:
        return not {"$ref", "anyOf", "allOf", "oneOf", "enum", "const"} & node.keys()
    return kind in (node["type"] if isinstance(node["type"], list) else [node["type"]])


def _is_listed(node: dict[str, Any]) -> bool:
    """Whether no property comes twice, and all names are listed or begin as a pattern says."""
    closed = NAMES in node and node.get("additionalProperties") is False
    return closed and None not in map(beginning, node.get("patternProperties", {}))


def _some_are_listed(document: dict[str, Any]) -> bool:
    return NAMES in json.dumps(document) and any(_is_listed(one) for one, _ in subschemas(document))


def _as_text(name: str) -> bytes:
    """A name as it is written between quotes."""
    return json.dumps(name, ensure_ascii=False)[1:-1].encode()


def _blanks(text: str) -> str:
    """A pattern for a text of a structure. A blank in it stands for any blanks, or none."""
    if not text.strip():
        return r"\A"
    return r"\s*".join(map(re.escape, text.split())).replace(r"\#", r"\d*")


def comes_after(text: str, other: str) -> bool:
    """Whether JSON that begins after `text` might be taken for JSON that begins after `other`."""
    return re.search(_blanks(other) + r"\s*\Z", text.replace("#", "0")) is not None
