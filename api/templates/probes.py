"""Asks a chat template once what it can show, with marked messages in small conversations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from personae.api.templates.marks import MARKED_TOOLS, RESULT_NAME, Marked, marked
from personae.api.templates.rewrite import Chat, Tools, rewritten
from personae.api.templates.sandbox import Program, within
from personae.api.templates.traits import CLIENTS, TemplateTraits
from personae.errors import TemplateTooSlow
from personae.grammar.tools.format import ToolFormat

_SECONDS = 1.0
_CHARACTERS = 2**20
_NINE = "{random:.9}"
_OWN_ID = ToolFormat.__dataclass_fields__["id"].default

_SYSTEM = {"role": "system", "content": "s"}
_DEVELOPER = {"role": "developer", "content": "d"}
_USER = {"role": "user", "content": "u"}
_ANSWER = {"role": "assistant", "content": "a"}
_REASONED = _ANSWER | {"reasoning_content": "r", "thinking": "r"}


def _call(*ids: str, **more: Any) -> dict[str, Any]:
    calls = [{"id": id, "type": "function", "function": {"name": "f", "arguments": {}}} for id in ids]
    return {"role": "assistant", "tool_calls": calls, **more}


def _result(id: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": "r", **more}


_CALLED = [_USER, _call("1"), _result("1")]
_NAMELESS_CALL: Chat = [
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
    {"role": "tool", "content": "r"},
]


def _tools(**function: Any) -> Tools:
    given = {**MARKED_TOOLS[0]["function"], **function}
    return [{"type": "function", "function": {key: one for key, one in given.items() if one is not None}}]


def _parameter(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"zqmparameter": schema}}


_UNION = _tools(parameters=_parameter(type=["string", "null"]))
_FULL = _tools(
    parameters={
        "type": "object",
        "properties": {
            "zqmparameter": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
            "zqminner": {
                "type": "object",
                "properties": {"zqmdeep": {"type": "integer", "minimum": 1}},
                "required": ["zqmdeep"],
                "additionalProperties": False,
            },
            "zqmany": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
        "required": ["zqmparameter"],
    }
)


@dataclass(frozen=True, slots=True)
class Probe:
    """One template, with the traits that are known so far."""

    program: Program
    format: ToolFormat
    traits: TemplateTraits

    def prompt(self, talk: Marked, tools: Tools | None = None, **variables: Any) -> str | None:
        """What the template writes; None if it fails."""
        chat, given = rewritten(talk.chat, tools, self.traits, self.format)
        try:
            return self.program.write(
                _CHARACTERS, messages=chat, tools=given, add_generation_prompt=True, **variables
            )
        except TemplateTooSlow:
            raise
        except Exception:  # a template is a program: it can fail in any way
            return None

    def shows(self, chat: Chat, tools: Tools | None = None, *, json: bool = False) -> bool:
        """Whether all of a conversation and the names of its tools get into the prompt, and no null content
        does; with `json`, no argument as Python writes it either."""
        talk = marked(chat)
        prompt = self.prompt(talk, tools)
        if prompt is None or talk.lost(prompt) or (json and talk.quoted(prompt)):
            return False
        if "None" in prompt and "None" not in self.program.source:
            return False
        return all(word in prompt for word in _words(tools)) if tools else True

    def first(self, changes: Sequence[dict[str, Any]], *talks: Chat, **options: Any) -> "Probe | None":
        """The probe with the first of the changes with which the template shows all of the conversations."""
        for change in changes:
            changed = replace(self, traits=replace(self.traits, **change))
            if all(changed.shows(talk, **options) for talk in talks):
                return changed
        return None


def _words(tools: Tools) -> Iterator[str]:
    """The texts of tools that must be in a prompt."""
    for tool in tools:
        function = tool["function"]
        yield function["name"]
        if function.get("description"):
            yield function["description"]
        yield from function.get("parameters", {}).get("properties", ())


def _values(name: str, *values: str) -> list[dict[str, Any]]:
    return [{name: value} for value in values]


def find_traits(program: Program, format: ToolFormat, *, described: bool) -> TemplateTraits:
    """What a template shows. `format` is how its model writes calls; `described`: tools, calls and results
    are to be text, whatever the template can do."""
    start = TemplateTraits(tools="described", calls="as text") if described else TemplateTraits()
    probe = Probe(program, format, start)
    try:
        with within(_SECONDS):
            for step in (_first_message, _roles, _tools_shown, _calls_shown, _turns_shown, _left_out):
                probe = step(probe)
                if probe.traits.user == "refused":
                    break
    except TemplateTooSlow:  # what is not known by now counts as shown, and is checked with each prompt
        pass
    return probe.traits


def _first_message(probe: Probe) -> Probe:
    forms = [
        {"content": content, "no_tools": no_tools}
        for content, no_tools in product(("text", "parts"), ("none", "an empty list"))
    ]
    found = probe.first(forms, [_USER])
    if found is None:
        role: Any = "shown" if "developer" in probe.program.source else "a system message"
        return replace(probe, traits=replace(probe.traits, user="refused", developer=role))
    empty = [[_USER | {"content": ""}], [_USER, _ANSWER | {"content": ""}, _USER]]
    return found.first(_values("empty", "shown", "a blank"), *empty) or found


def _roles(probe: Probe) -> Probe:
    systems = _values("system", "shown", "in the user's message")
    probe = probe.first(systems, [_SYSTEM, _USER], [_SYSTEM, _USER, _ANSWER, _USER]) or probe
    if "developer" in probe.program.source:
        probe = probe.first(_values("developer", "shown"), [_DEVELOPER, _USER]) or probe
    later = _values("later_system", "shown", "joined in front")
    middle = [_USER, _ANSWER, _SYSTEM, _USER]
    probe = (
        probe.first(later, middle, [_SYSTEM, *middle], [_USER, _SYSTEM], [_SYSTEM, _USER, _SYSTEM]) or probe
    )
    twice = [_USER, _ANSWER, _USER, _USER]
    probe = probe.first(_values("users", "shown", "joined"), [_USER, _USER], twice) or probe
    answers = [_USER, _ANSWER, _ANSWER]
    probe = probe.first(_values("assistants", "shown", "joined"), [*answers, _USER], answers) or probe
    firsts = _values("assistant_first", "shown", "after an empty one")
    return probe.first(firsts, [_ANSWER, _USER], [_SYSTEM, _ANSWER, _USER]) or probe


def _tools_shown(probe: Probe) -> Probe:
    if not probe.shows([_USER], MARKED_TOOLS):
        return replace(probe, traits=replace(probe.traits, tools="described"))
    for name, values, tools in (
        ("description", ("shown", "filled in"), _tools(description=None)),
        ("parameters", ("shown", "filled in"), _tools(parameters=None)),
        ("union", ("shown", "anyOf"), _UNION),
        ("tools", ("shown", "described"), _FULL),
    ):
        probe = probe.first(_values(name, *values), [_USER], tools=tools) or probe
    return probe


def _calls_shown(probe: Probe) -> Probe:
    own = [] if probe.format.id == _OWN_ID else [probe.format.id]
    forms = [
        {"ids": ids, "arguments": arguments, "call_content": content}
        for ids, arguments, content in product(
            dict.fromkeys([*own, CLIENTS, _NINE]), ("an object", "JSON text"), ("absent", "null", "empty")
        )
    ]
    ways = [_CALLED, [*_CALLED, _ANSWER, _USER]]
    if probe.traits.calls == "shown":
        found = probe.first(forms, *ways, tools=MARKED_TOOLS, json=True)
        found = found or probe.first(forms, *ways, tools=MARKED_TOOLS)
        probe = found or replace(probe, traits=replace(probe.traits, calls="as text"))
    return probe


def _turns_shown(probe: Probe) -> Probe:
    if probe.traits.calls == "as text":
        return probe
    said = [_USER, _call("1", content="c"), _result("1")]
    again = [_call("2", content="c"), _result("2")]
    texts = _values("text_and_call", "shown", "split", "the turn's text joined")
    probe = probe.first(texts, said, [*said, _ANSWER, _USER], [*said, *again], tools=MARKED_TOOLS) or probe
    several = [_USER, _call("1", "2"), _result("1"), _result("2")]
    ways = [several, [*several, _ANSWER, _USER]]
    probe = probe.first(_values("several_calls", "shown", "split"), *ways, tools=MARKED_TOOLS) or probe
    users = _values("user_after_result", "shown", "joined to the result")
    probe = probe.first(users, [*_CALLED, _USER], [*_CALLED, _USER, _ANSWER], tools=MARKED_TOOLS) or probe
    return _identities(probe)


def _identities(probe: Probe) -> Probe:
    """What the template does with ids and names."""
    named = marked([_USER, _call("1"), _result("1", name="n")])
    named.chat[1]["tool_calls"][0]["id"] = named.chat[2]["tool_call_id"] = "zqmid1234"
    written = probe.prompt(named, MARKED_TOOLS) or ""
    shown = "zqmid1234" in written or probe.traits.ids != CLIENTS
    names = RESULT_NAME in written
    traits = probe.traits
    nameless = [_USER, *_NAMELESS_CALL]
    if shown or not probe.shows(nameless, MARKED_TOOLS):
        traits = replace(traits, missing_ids="filled in")
    if names:
        traits = replace(traits, result_name="filled in")
    if not shown and not names:
        traits = replace(traits, result_order="by call")
    return replace(probe, traits=traits)


def _left_out(probe: Probe) -> Probe:
    """Which optional parts the template leaves out."""
    earlier = _keeps(probe, [_USER, _REASONED, _USER])
    current = _keeps(probe, [_USER, _call("1", reasoning_content="r", thinking="r"), _result("1")])
    traits = probe.traits
    if not earlier:
        traits = replace(traits, reasoning="in the current turn" if current else "left out")
    if not _keeps(probe, [_USER | {"name": "n"}]):
        traits = replace(traits, name="left out")
    return replace(probe, traits=traits)


def _keeps(probe: Probe, chat: Chat) -> bool:
    talk = marked(chat)
    prompt = probe.prompt(talk, MARKED_TOOLS if "tool_calls" in str(chat) else None)
    return prompt is not None and not talk.left_out(prompt)
