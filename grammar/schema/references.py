"""Rewrites references so that each is a pointer from the root of the document.

Identifiers (`$id`, `$anchor`), documents within the document, and dynamic references are resolved here, so
that nothing else needs to know them. Where a dynamic reference leads depends on the way to it: a schema is
written once for each way that makes a difference.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import jsonschema_rs

from personae.grammar.schema.document import Schema, dialect
from personae.grammar.schema.walk import MANY, NAMED, ONE, children, rebuild, subschemas

_MOST_SCHEMAS = 20_000
_DYNAMIC = ("$dynamicRef", "$recursiveRef")
_REFERENCES = ("$ref", *_DYNAMIC)
_IDENTIFYING = frozenset(
    {"$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions", "$vocabulary"}
)


class Unresolved(Exception):
    """A reference cannot be resolved; the message is its address, or the reason."""


def resolved(document: Schema) -> Schema:
    """An equal document in which every reference is "#", or "#/" and the way to a definition. The document
    itself if that is so already, or if a reference cannot be resolved."""
    if isinstance(document, bool) or not _needs_resolving(document):
        return document
    try:
        return _Rewriter(document).rewritten()
    except (Unresolved, RecursionError):
        return document


def missing(document: Schema) -> set[str]:
    """The addresses of documents to which references lead and that are not within the document."""
    if isinstance(document, bool):
        return set()
    index = _Index(document)
    found = set()
    for node, _ in subschemas(document):
        for keyword in _REFERENCES:
            if isinstance(reference := node.get(keyword), str):
                address = urldefrag(_joined(index.home(node).address, reference))[0]
                if address not in index.resources:
                    found.add(address)
    return found


def _needs_resolving(document: dict[str, Any]) -> bool:
    for node, path in subschemas(document):
        if path and ("$id" in node or "id" in node):
            return True
        reference = node.get("$ref", "#")
        if any(keyword in node for keyword in _DYNAMIC) or not isinstance(reference, str):
            return True
        if reference != "#" and not (reference.startswith("#/") and _leads_along_keywords(reference)):
            return True
    return False


def _leads_along_keywords(pointer: str) -> bool:
    """Whether a pointer leads through keywords alone, so that its target stays where what binds nothing is
    left out."""
    steps = iter(pointer.split("/")[1:])
    for step in steps:
        if step in NAMED or step in MANY:
            next(steps, None)
        elif step not in ONE and not step.isdecimal():  # older drafts have a list of `items`
            return False
    return True


@dataclass(slots=True)
class _Resource:
    """A document, or a part of one that has an identifier of its own."""

    address: str
    root: dict[str, Any]
    recursive: bool
    anchors: dict[str, Any] = field(default_factory=dict)
    dynamic: dict[str, Any] = field(default_factory=dict)


class _Scope(NamedTuple):
    """What dynamic references depend on: for each name the outermost resource that was entered with a dynamic
    anchor of this name; the outermost resource with `$recursiveAnchor`; and that from which on all had
    one."""

    names: frozenset[tuple[str, str]] = frozenset()
    outermost: str | None = None
    run: str | None = None


class _Index:
    """Finds resources, anchors, and the resource that each schema belongs to."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.draft = dialect(document)
        self._key = "id" if self.draft == jsonschema_rs.Draft4 else "$id"
        self.resources: dict[str, _Resource] = {}
        self._homes: dict[int, _Resource] = {}
        first = _Resource("", document, document.get("$recursiveAnchor") is True)
        self.resources[""] = first
        self.read(document, first)

    def home(self, node: dict[str, Any]) -> _Resource:
        """The resource that a schema belongs to."""
        return self._homes[id(node)]

    def read(self, schema: Any, around: _Resource) -> None:
        """Read a schema within `around`, and everything in it."""
        unseen = [(schema, around)]
        while unseen:
            node, here = unseen.pop()
            if isinstance(node, dict) and id(node) not in self._homes:
                here = self._begun(node, here)
                self._homes[id(node)] = here
                for keyword in ("$anchor", "$dynamicAnchor"):
                    if isinstance(name := node.get(keyword), str) and self.draft > jsonschema_rs.Draft7:
                        here.anchors.setdefault(name, node)
                        if keyword == "$dynamicAnchor":
                            here.dynamic.setdefault(name, node)
                unseen += [(child, here) for _, child in children(node)]

    def _begun(self, node: dict[str, Any], around: _Resource) -> _Resource:
        """The resource that begins with a schema; `around` if none does."""
        identifier = node.get(self._key)
        legacy = self.draft <= jsonschema_rs.Draft7
        if not isinstance(identifier, str) or (legacy and "$ref" in node):
            return around
        address, fragment = urldefrag(_joined(around.address, identifier))
        if fragment and legacy:
            around.anchors.setdefault(fragment, node)
        if identifier.startswith("#") or not address:
            return around
        if "$schema" in node and node is not self.resources[""].root and dialect(node) != self.draft:
            raise Unresolved("a part of the document is written in another draft")
        resource = _Resource(address, node, node.get("$recursiveAnchor") is True)
        if node is self.resources[""].root:
            resource = self.resources[""]
            resource.address = address
        return self.resources.setdefault(address, resource)

    def found(self, address: str) -> tuple[Any, _Resource]:
        """The schema at an address, and its resource. Raises Unresolved."""
        base, fragment = urldefrag(address)
        resource = self.resources.get(base)
        if resource is None:
            raise Unresolved(base)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if fragment not in resource.anchors:
                raise Unresolved(address)
            node = resource.anchors[fragment]
            return node, self._homes[id(node)]
        node, home = resource.root, resource
        for step in fragment.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(name)] if isinstance(node, list) else node[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise Unresolved(address) from None
            home = self._homes.get(id(node), home) if isinstance(node, dict) else home
        if not isinstance(node, dict | bool):
            raise Unresolved(address)
        self.read(node, home)
        return node, home if isinstance(node, bool) else self._homes[id(node)]


def _joined(base: str, reference: str) -> str:
    """The address of a reference, also where the base is a URN, which `urljoin` does not know."""
    if not reference:
        return base
    if reference.startswith("#"):
        return base + reference
    return reference if urlsplit(reference).scheme else urljoin(base, reference)


class _Rewriter:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._index = _Index(document)
        nodes = [node for node, _ in subschemas(document)]
        self._dynamic = any(keyword in node for node in nodes for keyword in _DYNAMIC)
        self._names: dict[tuple[int, _Scope], str] = {}
        self._unwritten: list[tuple[str, Any, _Scope]] = []
        self._kept: list[Any] = []
        self._left = _MOST_SCHEMAS

    def rewritten(self) -> dict[str, Any]:
        """The document. Raises Unresolved."""
        scope = self._entered(_Scope(), self._index.home(self._document))
        self._names[id(self._document), scope] = "#"
        whole: dict[str, Any] = self._written(self._document, scope)
        definitions: dict[str, Any] = {}
        while self._unwritten:
            name, node, scope = self._unwritten.pop()
            definitions[name] = self._written(node, scope)
        if "$schema" in self._document:
            whole["$schema"] = self._document["$schema"]
        if definitions:
            home = "$defs" if self._index.draft > jsonschema_rs.Draft7 else "definitions"
            whole[home] = dict(sorted(definitions.items(), key=lambda item: int(item[0][4:])))
        return whole

    def _entered(self, scope: _Scope, resource: _Resource) -> _Scope:
        """The scope within a resource."""
        if not self._dynamic:
            return scope
        known = {name for name, _ in scope.names}
        names = scope.names | {(name, resource.address) for name in resource.dynamic if name not in known}
        if not resource.recursive:
            return _Scope(names, scope.outermost, None)
        return _Scope(names, scope.outermost or resource.address, scope.run or resource.address)

    def _written(self, schema: Any, scope: _Scope) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._left -= 1
        if self._left < 0:
            raise Unresolved("too many schemas")
        here = self._index.home(schema)
        pointers = list(self._pointers(schema, here, scope))
        kept = {
            keyword: value
            for keyword, value in schema.items()
            if keyword not in _IDENTIFYING and keyword not in _REFERENCES and keyword != "$schema"
        }
        written = rebuild(kept, lambda _, child: self._written(child, self._below(child, here, scope)))
        if pointers and self._index.draft <= jsonschema_rs.Draft7:
            return {"$ref": pointers[0]}
        if pointers:
            written = {"$ref": pointers[0], **written}
        for pointer in pointers[1:]:
            written["allOf"] = [*written.get("allOf", ()), {"$ref": pointer}]
        return written

    def _below(self, child: Any, here: _Resource, scope: _Scope) -> _Scope:
        if not isinstance(child, dict) or self._index.home(child) is here:
            return scope
        return self._entered(scope, self._index.home(child))

    def _pointers(self, schema: dict[str, Any], here: _Resource, scope: _Scope) -> Iterator[str]:
        """Where the references of a schema lead, as pointers."""
        for keyword in _REFERENCES:
            reference = schema.get(keyword)
            if not isinstance(reference, str):
                continue
            if keyword != "$ref" and not self._dynamic:
                raise Unresolved("a dynamic reference is where no keyword leads")
            address = _joined(here.address, reference)
            node, home = self._index.found(address)
            if keyword == "$dynamicRef" and isinstance(node, dict):
                name = urldefrag(address)[1]
                outermost = dict(scope.names).get(name)
                if node.get("$dynamicAnchor") == name and outermost is not None:
                    home = self._index.resources[outermost]
                    node = home.dynamic[name]
            if keyword == "$recursiveRef" and home.recursive:
                if scope.run != scope.outermost or scope.run is None:
                    raise Unresolved("readers of the draft differ about where a recursive reference leads")
                home = self._index.resources[scope.run]
                node = home.root
            yield self._pointer(node, scope if home is here else self._entered(scope, home))

    def _pointer(self, node: Any, scope: _Scope) -> str:
        key = id(node), scope
        if key not in self._names:
            name = f"ref-{len(self._names)}"
            home = "$defs" if self._index.draft > jsonschema_rs.Draft7 else "definitions"
            self._names[key] = f"#/{home}/{name}"
            self._unwritten.append((name, node, scope))
            self._kept.append(node)
        return self._names[key]
