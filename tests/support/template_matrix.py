"""Writes docs/internals/template_traits.md: what the server does with each kind of conversation for the chat
templates of many models.

python tests/support/template_matrix.py
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

from personae.api.family import Family
from personae.api.templates.messages import plain_messages
from personae.api.templates.template import ChatTemplate
from personae.api.templates.traits import TemplateTraits
from personae.api.tools import shown_tools
from personae.api.wire.conversation import Message, Tool
from personae.errors import RequestError
from personae.grammar.reasoning.registry import find_reasoning_format
from personae.grammar.tools.registry import find_tool_format

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "internals" / "template_traits.md"
SHARED = "shared/data/tokenizers"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
PYTHON_ERROR = re.compile(r"Error|NoneType|has no attribute|object|concatenate|recursion|iterable|undefined")

Talk = list[dict[str, Any]]
Tools = list[dict[str, Any]]


def templates() -> list[Path]:
    """The templates of models that lie beside this repository. Empty where there are none."""
    folders = (parent / SHARED for parent in Path(__file__).parents)
    return [path for folder in folders for path in sorted(folder.glob("chat_templates*/*.jinja"))]


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(*calls: tuple[str | None, str], content: str | None = None, **more: Any) -> dict[str, Any]:
    made = []
    for id, city in calls:
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        made.append({"type": "function", "function": function} | ({"id": id} if id else {}))
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


def broken(id: str) -> dict[str, Any]:
    """A call whose arguments the model did not finish."""
    function = {"name": "get_weather", "arguments": '{"city": Rome'}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def result(id: str, content: Any = "12 C, rain", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


def tool(**function: Any) -> Tools:
    given = {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        **function,
    }
    return [
        {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}
    ]


HI, ANSWER, AGAIN = says("user", "Hi there."), says("assistant", "Hello, you."), says("user", "And now?")
BRIEF, FRENCH = says("system", "Be brief."), says("system", "Answer in French.")
ASKED = says("user", "Weather in Rome?")
CALLED = [ASKED, called(("call_1", "Rome")), result("call_1")]
TOOLS = tool()
UNION = {"type": "object", "properties": {"city": {"type": ["string", "null"], "description": "Or none."}}}


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation that clients send. `texts` must be in its prompt."""

    name: str
    talk: Talk
    tools: Tools | None = None
    texts: tuple[str, ...] = ()
    continues: bool = False
    own: bool = False  # nothing that transformers knows


CASES = (
    Case("one system message", [BRIEF, HI, ANSWER, AGAIN]),
    Case("two system messages in front", [BRIEF, FRENCH, HI]),
    Case("a developer message", [says("developer", "Be brief."), HI]),
    Case("system and developer", [BRIEF, says("developer", "Answer in French."), HI]),
    Case("a developer message and tools", [says("developer", "Be brief."), HI], TOOLS),
    Case("a system message in the middle", [HI, ANSWER, FRENCH, AGAIN]),
    Case("a second one in the middle", [BRIEF, HI, ANSWER, FRENCH, AGAIN]),
    Case("a system message at the end", [BRIEF, HI, says("system", "Skills: none.")]),
    Case("two user messages in a row", [HI, AGAIN]),
    Case("two answers in a row", [HI, ANSWER, says("assistant", "How are you?"), AGAIN]),
    Case("an answer first", [ANSWER, HI]),
    Case("a system message, then an answer", [BRIEF, ANSWER, HI]),
    Case("a list of parts", [says("user", [{"type": "text", "text": "Hi there."}])]),
    Case("empty content", [says("user", ""), says("assistant", ""), AGAIN]),
    Case("a continued answer", [HI, says("assistant", "Well then")], continues=True),
    Case("tools", [HI], TOOLS, ("The weather in a city.", "city")),
    Case("a tool without a description", [HI], tool(description=None), ("city",)),
    Case("a tool without parameters", [HI], tool(parameters=None), ("The weather in a city.",)),
    Case("a union type", [HI], tool(parameters=UNION), ("city",)),
    Case("a call and its result", CALLED, TOOLS),
    Case("the same without tools", CALLED),
    Case("an answer after it", [*CALLED, says("assistant", "It rains."), AGAIN], TOOLS),
    Case("a user message after a result", [*CALLED, AGAIN], TOOLS),
    Case("text beside a call", [ASKED, called(("call_1", "Rome"), content="Let me see."), CALLED[2]], TOOLS),
    Case(
        "several rounds with text",
        [
            BRIEF,
            ASKED,
            called(("call_1", "Rome"), content="Let me see."),
            CALLED[2],
            called(("call_2", "Oslo"), content="And the other."),
            result("call_2", "snow"),
            says("assistant", "Rain and snow."),
            AGAIN,
        ],
        TOOLS,
    ),
    Case(
        "several calls at once",
        [ASKED, called(("call_1", "Rome"), ("call_2", "Oslo")), CALLED[2], result("call_2", "snow")],
        TOOLS,
    ),
    Case(
        "their results in another order",
        [ASKED, called(("call_1", "Rome"), ("call_2", "Oslo")), result("call_2", "snow"), CALLED[2]],
        TOOLS,
    ),
    Case("ids of another server", [ASKED, called(("toolu_01AbCd", "Rome")), result("toolu_01AbCd")], TOOLS),
    Case("no ids", [ASKED, called((None, "Rome")), {"role": "tool", "content": "12 C, rain"}], TOOLS),
    Case(
        "a result of parts", [*CALLED[:2], result("call_1", [{"type": "text", "text": "12 C, rain"}])], TOOLS
    ),
    Case("an empty result", [*CALLED[:2], result("call_1", "")], TOOLS),
    Case("a system message and a call", [BRIEF, *CALLED], TOOLS),
    Case("reasoning", [HI, says("assistant", "Hello, you.", reasoning_content="A greeting."), AGAIN]),
    Case("only reasoning", [HI, says("assistant", None, reasoning_content="A greeting."), AGAIN]),
    Case(
        "reasoning before a call",
        [ASKED, called(("call_1", "Rome"), reasoning_content="Hm, Rome."), CALLED[2]],
        TOOLS,
    ),
    Case("arguments that are no JSON", [ASKED, broken("call_1"), CALLED[2]], TOOLS, own=True),
    Case(
        "names",
        [says("user", "Hi there.", name="ada"), says("assistant", "Hello, you.", name="bob"), AGAIN],
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case: "shown", "rewritten", "refused" or, which must not be, a fault."""

    kind: str
    fault: str = ""
    left_out: tuple[str, ...] = ()


@cache
def template_of(path: Path) -> ChatTemplate:
    """The template as the server compiles it for a model that has only this one."""
    source = path.read_text(encoding="utf-8")
    format, thoughts = find_tool_format(source), find_reasoning_format(source)
    return Family.compiled({"default": source}, SPECIAL, format, thoughts)[0]["default"]


def outcome(path: Path, case: Case) -> Outcome:
    """What the server does with a conversation."""
    template = template_of(path)
    messages = msgspec.convert(case.talk, list[Message])
    tools = shown_tools(msgspec.convert(case.tools, list[Tool])) if case.tools else None
    left_out: list[str] = []
    try:
        prompt = template.render(
            messages,
            tools=tools,
            add_generation_prompt=not case.continues,
            continue_final_message=case.continues,
            left_out=left_out,
        )
        talk, given = template.conversation(messages, tools=tools, add_generation_prompt=not case.continues)
    except RequestError as error:
        named = str(error.param).startswith(("messages[", "tools[", "chat_template_kwargs"))
        clear = named and not PYTHON_ERROR.search(error.message)
        return Outcome("refused", "" if clear else f"{error.param}: {error.message}")
    missing = [text for text in _texts(case) if text not in prompt]
    missing += [name for name in _optional(case, prompt) if name not in left_out]
    if missing:
        return Outcome("lost", f"lost: {', '.join(missing)}")
    if not (case.continues or case.own) and prompt != _of_transformers(template.source, talk, given):
        return Outcome("different", "transformers renders these messages differently")
    unchanged = (talk, given or None) == (plain_messages(messages), tools)
    return Outcome("shown" if unchanged else "rewritten", left_out=tuple(left_out))


def _texts(case: Case) -> Iterator[str]:
    """What must be in the prompt: contents, results, names of functions and arguments."""
    yield from case.texts
    for message in case.talk:
        content = message["content"]
        yield from (part["text"] for part in content) if isinstance(content, list) else [content or ""]
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            arguments = call["function"]["arguments"]
            yield from json.loads(arguments).values() if arguments.endswith("}") else ["city", ": Rome"]
    yield from (tool["function"]["name"] for tool in case.tools or ())


def _optional(case: Case, prompt: str) -> Iterator[str]:
    """The kinds of optional parts that are not in the prompt."""
    for message in case.talk:
        for key in ("reasoning_content", "name"):
            if key in message and message[key] not in prompt:
                yield f"messages[].{key}"


def _of_transformers(source: str, talk: Talk, tools: Tools | None) -> str:
    [prompt], _ = render_jinja_template(
        [talk], tools=tools, chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    return str(prompt)


def outcomes() -> dict[Path, list[Outcome]]:
    """The outcome of every case for every template."""
    return {path: [outcome(path, case) for case in CASES] for path in templates()}


_CELLS = {"shown": "·", "rewritten": "r", "refused": "×"}


def page(found: dict[Path, list[Outcome]]) -> str:
    """The page."""
    kinds = Counter(each.kind for row in found.values() for each in row)
    faults = sum(bool(each.fault) for row in found.values() for each in row)
    about = f"""# What chat templates show

`python tests/support/template_matrix.py` writes this page. `tests/api/templates/test_matrix.py` computes it
again. The templates are those of `shared/data/tokenizers`: {len(found)} files from TRL and llama.cpp. Each is
asked as if its model had no other.

A template is asked once, when it is loaded, what it can show (`api/templates/`). Each conversation is
rewritten to that, and marks show that all of it is in the prompt. transformers renders the messages that the
template gets to the same text.

| {len(CASES)} conversations × {len(found)} templates | |
|---|---|
| · shown: the template gets the messages and tools unchanged | {kinds["shown"]} |
| r rewritten: all of it is in the prompt | {kinds["rewritten"]} |
| × refused with a 400 that names the message or the variable | {kinds["refused"]} |
| lost, or refused with an error of Python's | {faults} |

The one template that is refused, firefunction's, needs variables that only `chat_template_kwargs` can set. A
small o says that the template leaves out reasoning or names. The answer's header `x-personae-ignored` then
lists `messages[].reasoning_content` or `messages[].name`.

## Conversations
"""
    lines = [about]
    lines += [f"{number}. {case.name}" for number, case in enumerate(CASES, 1)]
    lines += ["", "## Outcomes", ""]
    lines.append("| template | " + " | ".join(str(number) for number in range(1, len(CASES) + 1)) + " |")
    lines.append("|---" * (len(CASES) + 1) + "|")
    for path, row in found.items():
        cells = (_CELLS.get(each.kind, "LOST") + "o" * bool(each.left_out) for each in row)
        lines.append(f"| {path.stem} | " + " | ".join(cells) + " |")
    lines += ["", "## Traits", "", "Where a template differs from one that shows everything:", ""]
    lines += ["| template | traits |", "|---|---|"]
    for path in found:
        lines.append(f"| {path.stem} | {_differences(template_of(path).traits)} |")
    return "\n".join(lines) + "\n"


def _differences(traits: TemplateTraits) -> str:
    perfect = TemplateTraits()
    return "; ".join(
        f"{field.name.replace('_', ' ')}: {getattr(traits, field.name)}"
        for field in fields(TemplateTraits)
        if getattr(traits, field.name) != getattr(perfect, field.name)
    )


if __name__ == "__main__":
    PAGE.write_text(page(outcomes()), encoding="utf-8")
