"""Rewrites a conversation to what its chat template shows.

Every function here gets plain messages and returns new ones. None changes what it got, and none loses a text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby, takewhile
from typing import Any

from personae.api.templates.messages import MalformedArguments
from personae.api.templates.tool_text import RESULT, call_text, describe, result_text
from personae.api.templates.traits import CLIENTS, TemplateTraits
from personae.grammar.tools.format import ToolFormat

Chat = list[dict[str, Any]]
Tools = list[dict[str, Any]]
_PARAGRAPH = "\n\n"


def rewritten(
    chat: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    traits: TemplateTraits,
    format: ToolFormat,
) -> tuple[Chat, Tools | None]:
    """The messages and tools as the template gets them. `format` is how the model writes calls in text."""
    messages = [dict(message) for message in chat]
    described = tools if traits.tools == "described" else None
    if traits.calls == "as text":
        messages = _calls_as_text(messages, format)
    messages = _systems(messages, traits, describe(described, format) if described else "")
    if traits.assistant_first == "after an empty one":
        messages = _after_an_empty_one(messages)
    if traits.calls == "shown":
        messages = _named_results(_identified(messages, traits), traits)
        messages = _in_order(messages) if traits.result_order == "by call" else messages
        messages = _one_call_each(messages) if traits.several_calls == "split" else messages
        if traits.text_and_call == "split":
            messages = [part for message in messages for part in _text_then_calls(message)]
        elif traits.text_and_call == "the turn's text joined":
            messages = list(_turns_text_joined(messages))
        messages = [_call_form(message, traits) for message in messages]
    messages = _joined(messages, traits)
    messages = [_content_form(message, traits) for message in messages]
    if tools is None or described:
        return messages, [] if traits.no_tools == "an empty list" else None
    return messages, [_tool_form(tool, traits) for tool in tools]


def _systems(messages: Chat, traits: TemplateTraits, extra: str) -> Chat:
    """One system message in front, which ends with `extra`; later ones where the template shows them."""
    if traits.developer == "a system message":
        messages = [_with_role(one, "system") if one["role"] == "developer" else one for one in messages]
    front = list(takewhile(_is_system, messages))
    rest = messages[len(front) :]
    if traits.later_system == "joined in front":
        front += filter(_is_system, rest)
        rest = [message for message in rest if not _is_system(message)]
    text = _PARAGRAPH.join(part for part in (*(one["content"] for one in front), extra) if part)
    if traits.system == "shown":
        if len(front) == 1 and not extra:
            return [*front, *rest]
        role = "system" if not front or any(one["role"] == "system" for one in front) else "developer"
        return [{"role": role, "content": text}, *rest] if front or extra else rest
    if not text:
        return rest
    if rest and rest[0]["role"] == "user":
        return [_said_first(rest[0], text), *rest[1:]]
    return [{"role": "user", "content": text}, *rest]


def _after_an_empty_one(messages: Chat) -> Chat:
    """An empty message of the user before an assistant's that would be the first."""
    front = list(takewhile(_is_system, messages))
    rest = messages[len(front) :]
    if not rest or rest[0]["role"] != "assistant":
        return messages
    return [*front, {"role": "user", "content": ""}, *rest]


def _calls_as_text(messages: Chat, format: ToolFormat) -> Chat:
    """Calls as the assistant's text, and results as the user's. Consecutive results, and what the user says
    after them, become one message."""
    plain: Chat = []
    for message in messages:
        if message["role"] == "tool":
            message = {"role": "user", "content": result_text(message["content"])}
        elif message.get("tool_calls"):
            said = [message["content"]] if message.get("content") else []
            calls = call_text([call["function"] for call in message["tool_calls"]], format)
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            message = kept | {"content": "\n".join([*said, calls])}
        last = plain[-1] if plain else None
        if last and last["role"] == message["role"] == "user" and last["content"].startswith(RESULT):
            plain[-1] = last | {"content": f"{last['content']}\n{message['content']}"}
        else:
            plain.append(message)
    return plain


def _identified(messages: Chat, traits: TemplateTraits) -> Chat:
    """Ids of the template's form. A call and its result keep the same id."""
    if traits.ids == CLIENTS and traits.missing_ids == "absent":
        return messages
    known: dict[str, str] = {}  # the client's ids and the template's
    waiting: list[tuple[str, str]] = []  # the calls that nothing has answered yet: their names and ids
    number = 0
    found: Chat = []
    for message in messages:
        if calls := message.get("tool_calls"):
            own = []
            for call in calls:
                name, given = call["function"]["name"], call.get("id")
                id = _id(traits.ids, given, name, number)
                if given is not None:
                    known[given] = id
                waiting.append((name, id))
                own.append({"id": id} | call | {"id": id})
                number += 1
            message = message | {"tool_calls": own}
        elif message["role"] == "tool":
            id = known.get(message.get("tool_call_id", "")) or _first_waiting(waiting, message.get("name"))
            waiting = [(name, one) for name, one in waiting if one != id]
            message = message | {"tool_call_id": id}
        found.append(message)
    return found


def _first_waiting(waiting: Sequence[tuple[str, str]], name: str | None) -> str:
    """The id of the first call, of that function if the result says which."""
    named = [id for of, id in waiting if name is None or of == name]
    return next(iter(named or [id for _, id in waiting]), "000000000")


def _id(form: str, given: str | None, name: str, number: int) -> str:
    """A client's id if it has the form. Otherwise one of the form, always the same for the same call."""
    form = form or "call_{random:.24}"
    if given is not None and re.fullmatch(_id_pattern(form), given):
        return given
    digest = blake2b((given or f"{number} {name}").encode()).hexdigest()
    return form.format(random=digest, name=name, number=number)


def _id_pattern(form: str) -> str:
    pattern = re.sub(r"\\\{random:\\\.(\d+)\\\}", r"[A-Za-z0-9]{\1}", re.escape(form))
    return pattern.replace(r"\{name\}", ".+").replace(r"\{number\}", r"\d+")


def _named_results(messages: Chat, traits: TemplateTraits) -> Chat:
    """Results with the names of their functions."""
    if traits.result_name == "absent":
        return messages
    names: dict[str | None, str] = {}
    found: Chat = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names:
            message = message | {"name": names[message.get("tool_call_id")]}
        found.append(message)
    return found


def _in_order(messages: Chat) -> Chat:
    """The results of a message's calls in the order of these calls."""
    found: Chat = []
    for calls, results in _rounds(messages):
        order = {call.get("id"): at for at, call in enumerate(calls.get("tool_calls", ()))}
        late = len(order)
        found += [calls, *sorted(results, key=lambda one: order.get(one.get("tool_call_id"), late))]
    return found


def _one_call_each(messages: Chat) -> Chat:
    """A message per call, each before its own result. The first has the text and the reasoning."""
    found: Chat = []
    for message, results in _rounds(messages):
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found += [message, *results]
            continue
        left = results
        for at, call in enumerate(calls):
            own = [one for one in left if one.get("tool_call_id") == call.get("id")]
            own = own if "id" in call else own[:1]  # without ids, only their order tells them apart
            left = [one for one in left if not any(one is other for other in own)]
            found += [(message if at == 0 else {"role": message["role"]}) | {"tool_calls": [call]}, *own]
        found += left
    return found


def _rounds(messages: Chat) -> Iterator[tuple[dict[str, Any], Chat]]:
    """Each message that is no result, with the results directly after it."""
    at = 0
    while at < len(messages):
        results = []
        if messages[at].get("tool_calls"):
            results = list(takewhile(lambda one: one["role"] == "tool", messages[at + 1 :]))
        yield messages[at], results
        at += 1 + len(results)


def _text_then_calls(message: dict[str, Any]) -> Chat:
    """The text and the calls of a message as two messages."""
    if not message.get("tool_calls") or not message.get("content"):
        return [message]
    text = {key: value for key, value in message.items() if key != "tool_calls"}
    return [text, {"role": message["role"], "tool_calls": message["tool_calls"]}]


def _turns_text_joined(messages: Chat) -> Iterator[dict[str, Any]]:
    """All that the assistant says in a turn as one message: the turn's last one, or its first if the turn
    ends with a call or a result."""
    for own, group in groupby(messages, key=lambda one: one["role"] in ("assistant", "tool")):
        turn = list(group)
        said = [one["content"] for one in turn if one["role"] == "assistant" and one.get("content")]
        calls = any(one.get("tool_calls") for one in turn)
        if not own or not calls or not said:
            yield from turn
            continue
        text = {"role": "assistant", "content": _PARAGRAPH.join(said)}
        rest = [_without_text(one) if one["role"] == "assistant" else one for one in turn[:-1]]
        last = turn[-1]
        if last["role"] == "assistant" and not last.get("tool_calls"):
            yield from filter(None, rest)
            yield last | text
        else:
            yield text
            yield from filter(None, (*rest, _without_text(last) if last["role"] == "assistant" else last))


def _without_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message without its content; nothing if it has nothing else."""
    kept = {key: value for key, value in message.items() if key != "content"}
    return kept if kept.keys() & {"tool_calls", "reasoning_content"} else {}


def _call_form(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    """A message that calls, with content and arguments as the template expects them."""
    if not message.get("tool_calls"):
        return message
    if traits.arguments == "JSON text":
        calls = [call | {"function": _with_argument_text(call["function"])} for call in message["tool_calls"]]
        message = message | {"tool_calls": calls}
    if message.get("content") or traits.call_content == "absent":
        return message
    return message | {"content": None if traits.call_content == "null" else ""}


def _with_argument_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = (
        arguments if isinstance(arguments, MalformedArguments) else json.dumps(arguments, ensure_ascii=False)
    )
    return dict(function) | {"arguments": text}


def _joined(messages: Chat, traits: TemplateTraits) -> Chat:
    """Consecutive messages of one role as one, where the template needs that."""
    found: Chat = []
    for message in messages:
        last = found[-1] if found else None
        if last is not None and _joins(last, message, traits):
            texts = [text for text in (last.get("content"), message.get("content")) if text]
            found[-1] = last | {"content": _PARAGRAPH.join(texts)}
            for key in ("reasoning_content", "thinking"):
                if thoughts := [one[key] for one in (last, message) if one.get(key)]:
                    found[-1][key] = _PARAGRAPH.join(thoughts)
        else:
            found.append(message)
    return found


def _joins(last: Mapping[str, Any], message: Mapping[str, Any], traits: TemplateTraits) -> bool:
    match last["role"], message["role"]:
        case "user", "user":
            return traits.users == "joined"
        case "tool", "user":
            return traits.user_after_result == "joined to the result"
        case "assistant", "assistant":
            calls = last.get("tool_calls") or message.get("tool_calls")
            return traits.assistants == "joined" and not calls
    return False


def _content_form(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    if traits.empty == "a blank" and message.get("content") == "" and not message.get("tool_calls"):
        message = message | {"content": " "}
    if traits.content == "parts" and isinstance(message.get("content"), str):
        message = message | {"content": [{"type": "text", "text": message["content"]}]}
    return message


def _tool_form(tool: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    function = dict(tool["function"])
    if traits.description == "filled in":
        function.setdefault("description", "")
    if traits.parameters == "filled in":
        function.setdefault("parameters", {"type": "object", "properties": {}})
    if traits.union == "anyOf" and "parameters" in function:
        function["parameters"] = _without_unions(function["parameters"])
    return tool | {"function": function}


def _without_unions(schema: Any) -> Any:
    """A schema whose lists of types are `anyOf`."""
    if isinstance(schema, list):
        return [_without_unions(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: value if key in _VALUES else _without_unions(value) for key, value in schema.items()}
    types = plain.get("type")
    if not isinstance(types, list) or "anyOf" in plain or not all(isinstance(one, str) for one in types):
        return plain
    about = {key: plain.pop(key) for key in ("description", "title", "default") if key in plain}
    del plain["type"]
    return about | {"anyOf": [{"type": one} | _of_type(plain, one) for one in types]}


_VALUES = frozenset({"enum", "const", "default", "examples"})
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "minItems", "maxItems", "uniqueItems", "prefixItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
}


def _of_type(schema: Mapping[str, Any], type: str) -> dict[str, Any]:
    """The keywords that matter to a value of that type."""
    foreign = set().union(*(keys for name, keys in _OF_TYPE.items() if name != type))
    return {key: value for key, value in schema.items() if key not in foreign}


def _is_system(message: Mapping[str, Any]) -> bool:
    return message["role"] in ("system", "developer")


def _with_role(message: Mapping[str, Any], role: str) -> dict[str, Any]:
    return dict(message) | {"role": role}


def _said_first(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    return dict(message) | {"content": _PARAGRAPH.join(part for part in (text, message["content"]) if part)}
