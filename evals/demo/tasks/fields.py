"""Named, typed fields with values: what tools take as parameters and records have as properties."""

from dataclasses import dataclass
from typing import Any

from personae.evals.demo import words
from personae.evals.demo.values import Value, Values, text_of

KINDS = tuple(words.PARAMETERS)
JSON_TYPES = {"integer": "integer", "number": "number", "boolean": "boolean"}
GENERIC = (
    "{p} {v}",
    "{p}: {v}",
    "the {p} is {v}",
    "with {p} {v}",
    "{v} as {p}",
    "{p} = {v}",
    "{p} should be {v}",
)
# Wording that leaves the field's name out, and the description that lets it be understood all the same.
NATURAL = {
    "person": (("for {v}", "with {v}"), "who"),
    "place": (("in {v}",), "where"),
    "date": (("on {v}",), "a date"),
    "time": (("at {v}",), "a time"),
    "email": (("to {v}",), "a mail address"),
    "enum": (("make it {v}",), ""),
}


@dataclass(frozen=True)
class Field:
    """A field of a tool or record, with the value it is to get."""

    name: str
    kind: str
    value: Value
    options: tuple[str, ...] = ()
    required: bool = True
    mentioned: bool = True
    description: str = ""

    @property
    def words(self) -> str:
        """The name as a user says it."""
        return self.name.replace("_", " ")

    @property
    def schema(self) -> dict[str, Any]:
        """The property's JSON Schema."""
        schema: dict[str, Any] = {"type": JSON_TYPES.get(self.kind, "string")}
        if self.options:
            schema["enum"] = list(self.options)
        if self.description:
            schema["description"] = self.description
        return schema


def draw_fields(values: Values, count: int, optional: float = 0.0) -> list[Field]:
    """Distinctly named fields; each is optional with the given probability, and then may go unmentioned."""
    rng = values.rng
    fields: dict[str, Field] = {}
    while len(fields) < count:
        kind = rng.choice(KINDS)
        name = values.parameter(kind)
        options = tuple(values.options()) if kind == "enum" else ()
        if kind == "enum":
            value: Value = rng.choice(options)
        elif kind == "boolean":
            value = rng.random() < 0.5
        else:
            value = values.of_kind(kind)
        required = rng.random() >= optional
        mentioned = required or rng.random() < 0.5
        description = ""
        if kind in NATURAL and rng.random() < 0.5:
            description = NATURAL[kind][1]
        elif rng.random() < 0.15:
            description = rng.choice(("the ", "The ", "")) + name.replace("_", " ")
        fields.setdefault(name, Field(name, kind, value, options, required, mentioned, description))
    return list(fields.values())


def object_schema(fields: list[Field]) -> dict[str, Any]:
    """The JSON Schema of an object with these fields."""
    return {
        "type": "object",
        "properties": {field.name: field.schema for field in fields},
        "required": [field.name for field in fields if field.required],
    }


def mention(values: Values, item: Field, siblings: list[Field]) -> str:
    """A phrase that gives the field its value; natural wording only where no sibling has the same kind."""
    rng = values.rng
    if item.kind == "boolean":
        forms = ("{p}: yes", "make it {p}", "{p} = yes") if item.value else ("{p}: no", "not {p}", "{p} = no")
        return rng.choice(forms).format(p=item.words)
    alone = sum(other.kind == item.kind for other in siblings) == 1
    if alone and item.kind in NATURAL and item.description == NATURAL[item.kind][1] and rng.random() < 0.6:
        return rng.choice(NATURAL[item.kind][0]).format(v=item.value)
    value = text_of(item.value)
    if item.kind == "text" and rng.random() < 0.5:
        value = f'"{value}"'
    return rng.choice(GENERIC).format(p=item.words, v=value)


def record_of(fields: list[Field]) -> dict[str, Value]:
    """The values that were mentioned, in schema order."""
    return {field.name: field.value for field in fields if field.mentioned}
