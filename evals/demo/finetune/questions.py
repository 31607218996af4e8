"""The held-out questions of the tasks, and what is right of an answer."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from personae.api.templates.tool_text import describe
from personae.evals.demo.finetune import sql, verse
from personae.evals.demo.finetune.scene import Scene, Turn
from personae.evals.demo.finetune.tasks import GENERATORS
from personae.evals.suites.bfcl.schema import closed
from personae.grammar.tools.registry import GENERIC, tool_format

SEED = "held out 1"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_REGEX = {
    "sql": r"SELECT [^;\n]{1,300};",
    "verse": r"[A-Z][^\n]{10,70},\n[a-z][^\n]{10,70}\.",
}


class Question(NamedTuple):
    """One question. `id` ends with the kind of question, where a task has several. `bound` are the request's
    fields that bind the answer, apart from tools."""

    id: str
    task: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    bound: dict[str, Any]
    turn: Turn

    def body(self, *, bound: bool) -> dict[str, Any]:
        """The request, without the model.

        Free is the same prompt without a grammar: tools stand in a system message, as the server's generic
        format writes it, and no field binds the answer.
        """
        if bound:
            tools = {"tools": [_strict(one) for one in self.tools]} if self.tools else {}
            return {"messages": self.messages, **tools, **self.bound}
        if not self.tools:
            return {"messages": self.messages}
        own = [one["content"] for one in self.messages if one["role"] == "system"]
        system = "\n\n".join([*own, describe(self.tools, tool_format(GENERIC))])
        rest = [one for one in self.messages if one["role"] != "system"]
        return {"messages": [{"role": "system", "content": system}, *rest]}


def held_out(task: str, count: int) -> Iterator[Question]:
    """The questions of a task's held-out split, drawn by a seed."""
    rng = random.Random(f"{SEED} {task}")
    for number in range(count):
        scene: Scene = GENERATORS[task](rng, test=True, turns=1)
        turn = scene.turns[0]
        bound: dict[str, Any] = {}
        if scene.schema is not None:
            shape = {"name": "answer", "strict": True, "schema": scene.schema}
            bound = {"response_format": {"type": "json_schema", "json_schema": shape}}
        elif task in _REGEX:
            bound = {"structured_outputs": {"regex": _REGEX[task]}}
        kind = f"/{turn.kind}" if turn.kind else ""
        yield Question(f"{task}/{number:04}{kind}", task, scene.messages(turn), scene.tools, bound, turn)


def grade(question: Question, message: dict[str, Any]) -> dict[str, float]:
    """`right`, and what else is counted of the task, of an answer's message."""
    text, turn = message.get("content") or "", question.turn
    if question.task == "tools":
        return _tools(turn, calls_of(message))
    if question.task == "sql":
        return {"right": float(sql.right(text, turn))}
    if question.task == "verse":
        return {"right": float(verse.right(text, turn))}
    return _record(turn, text)


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The calls of an answer, bound or free; None if what should be one is none."""
    written = message.get("tool_calls") or []
    try:
        if not written:
            found = [json.loads(text) for text in _CALL.findall(message.get("content") or "")]
            return [{"name": one["name"], "arguments": one["arguments"]} for one in found]
        functions = [one["function"] for one in written]
        return [{"name": one["name"], "arguments": json.loads(one["arguments"])} for one in functions]
    except (ValueError, KeyError, TypeError):
        return None


def _strict(one: dict[str, Any]) -> dict[str, Any]:
    """The tool as OpenAI's strict mode wants it."""
    function = one["function"]
    return {**one, "function": {**function, "strict": True, "parameters": closed(function["parameters"])}}


def _tools(turn: Turn, calls: list[dict[str, Any]] | None) -> dict[str, float]:
    names = sorted(one["name"] for one in turn.calls)
    named = calls is not None and sorted(str(one["name"]) for one in calls) == names
    return {"right": float(named and _sorted(calls or []) == _sorted(turn.calls)), "tool": float(named)}


def _sorted(calls: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(_plain(one), sort_keys=True) for one in calls)


def _plain(value: Any) -> Any:
    """A number that is whole is whole, however it is written."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _record(turn: Turn, text: str) -> dict[str, float]:
    try:
        given = json.loads(text.strip().removeprefix("```json").removeprefix("```").removesuffix("```"))
    except ValueError:
        given = None
    if not isinstance(given, dict):
        return {"right": 0.0, "fields": 0.0}
    same = [_plain(given.get(key, ...)) == _plain(value) for key, value in turn.facts.items()]
    return {"right": float(all(same) and given.keys() == turn.facts.keys()), "fields": sum(same) / len(same)}
