"""Conversations that go on after a call: results, errors, several rounds, and further questions."""

import json
import random
from dataclasses import replace
from typing import Any

from personae.evals.demo.finetune import values as v
from personae.evals.demo.finetune.made import ASKS, THINGS
from personae.evals.demo.finetune.results import Result, failed, sentence, succeeded, value_text
from personae.evals.demo.finetune.scene import Scene, Step, Turn
from personae.evals.demo.finetune.talk import FIXED_ANSWERS
from personae.evals.demo.finetune.tools import (
    Offered,
    Parameter,
    Spec,
    any_call,
    argument,
    held_out,
    no_call,
    offer,
    specs,
    value_of,
)
from personae.evals.demo.finetune.tools import scene as single

GRATEFUL = (
    ("Thanks!", "You're welcome!"), ("Thank you, that was all.", "You're welcome!"), ("Great, thank you.", "You're welcome!"),
    ("Perfect.", "Glad to help."), ("OK, good to know.", "Glad to help."), ("Bye!", "Goodbye!"), ("Cool", "Glad to help."),
)  # fmt: skip
AGAIN = (
    "And {}?",
    "What about {}?",
    "And for {}?",
    "Now {}, please.",
    "Same for {}.",
    "How about {}?",
    "And what about {}?",
)
RETRY = ("Try again.", "Please try it again.", "Try once more, please.", "Can you retry?")
_Call = dict[str, Any]


def scene(rng: random.Random, *, test: bool, turns: int) -> Scene:
    """A list of tools, and conversations with them."""
    system = rng.choice(FIXED_ANSWERS) if rng.random() < 0.12 else None
    if rng.random() < 0.14:
        tools, made = _dependent(rng, test=test, turns=turns)
    else:
        count = rng.choices((1, 2, 3, 4, 5, 6), (40, 24, 14, 10, 7, 5))[0]
        tools = [offer(spec, rng) for spec in specs(rng, count, test=test)]
        made = [_conversation(tools, rng, test=test) for _ in range(turns)]
    return Scene("tools", [tool.schema for tool in tools], system, made)


def mixed(rng: random.Random, *, test: bool, turns: int) -> Scene:
    """What the adapter is trained on: single answers and whole conversations, about as many tokens of each."""
    if rng.random() < 0.45:
        return single(rng, test=test, turns=turns)
    return scene(rng, test=test, turns=turns - 2)


def _conversation(tools: list[Offered], rng: random.Random, *, test: bool) -> Turn:
    turn = any_call(tools, rng, test=test)
    calls = turn.calls
    steps, error = _answered(calls, rng)
    for _ in range(rng.choices((0, 1, 2), (45, 42, 13))[0]):
        more, error = _further(tools, calls, error, rng, test=test)
        steps += more
        calls = next((step.calls for step in more if step.calls), calls)
    return replace(turn, kind="dialog", steps=steps)


def _answered(calls: list[_Call], rng: random.Random) -> tuple[list[Step], bool]:
    """The results of calls and the answer, and whether the last failed."""
    error = rng.random() < 0.17
    results = [failed(rng) if error else succeeded(rng, call["arguments"]) for call in calls]
    return [Step([_tool(result) for result in results], _answer(calls, results))], error


def _answer(calls: list[_Call], results: list[Result]) -> str:
    """One result's sentence, or those of several, each under what its call was about."""
    if len(results) == 1:
        return results[0].said
    about = [_about(call) for call in calls]
    return " ".join(
        f"{sentence(name).rstrip('.')}: {one.said}" for name, one in zip(about, results, strict=True)
    )


def _about(call: _Call) -> str:
    """What a call is about: its first argument, else its name."""
    return next((value_text(value) for value in call["arguments"].values()), call["name"])


def _further(
    tools: list[Offered], calls: list[_Call], error: bool, rng: random.Random, *, test: bool
) -> tuple[list[Step], bool]:
    draw = rng.random()
    if error and draw < 0.5:
        steps, error = _answered(calls, rng)
        return [Step([_user(rng.choice(RETRY))], "", calls), *steps], error
    if draw < 0.16:
        said, answer = rng.choice(GRATEFUL)
        return [Step([_user(said)], answer)], False
    if draw < 0.38:
        turn = no_call(tools, rng, test=test)
        return [Step([_user(turn.user)], turn.text)], False
    if draw < 0.65 and len(calls) == 1 and (again := _again(tools, calls[0], rng)) is not None:
        text, next_calls = again
    else:
        turn = any_call(tools, rng, test=test)
        text, next_calls = turn.user, turn.calls
    steps, error = _answered(next_calls, rng)
    return [Step([_user(text)], "", next_calls), *steps], error


def _again(tools: list[Offered], call: _Call, rng: random.Random) -> tuple[str, list[_Call]] | None:
    """The same call with another value, asked for in a few words."""
    tool = next(tool for tool in tools if tool.schema["function"]["name"] == call["name"])
    wanted = [
        p for p in tool.spec.parameters if p.required and not p.kind.startswith(("list", "bool", "matrix"))
    ]
    if len(wanted) != 1:
        return None
    value = value_of(wanted[0].kind, rng)
    arguments = {**call["arguments"], tool.names[wanted[0].name]: argument(tool, wanted[0], value)}
    return rng.choice(AGAIN).format(value.said), [{"name": call["name"], "arguments": arguments}]


def _dependent(rng: random.Random, *, test: bool, turns: int) -> tuple[list[Offered], list[Turn]]:
    """Two tools, the second of which needs what the first finds."""
    thing = rng.choice([thing for thing in THINGS if held_out(thing) is test])
    verb = rng.choice(("update", "inspect", "assign", "archive", "configure", "reserve", "check_status_of"))
    key = rng.choice(("reference", "id", f"{thing.replace(' ', '_')}_id", "number", "code"))
    by, kind = rng.choice(
        (
            ("owner", "person"),
            ("email", "email"),
            ("city", "city"),
            ("supplier", "company"),
            ("label", "word"),
        )
    )
    about = f"{key.replace('_', ' ').capitalize()} of the {thing}"
    place = thing.replace(" ", "_")
    find = Spec(
        "find",
        f"find_{place}",
        f"Find the {key.replace('_', ' ')} of a {thing}.",
        (Parameter(by, kind, f"{by.capitalize()} of the {thing}", True),),
        (),
    )
    action = Spec(
        verb,
        f"{verb}_{place}",
        f"{verb.replace('_', ' ').capitalize()} a {thing}.",
        (Parameter(key, "code", about, True),),
        (),
    )
    first, second = offer(find, rng), offer(action, rng)
    others = [offer(spec, rng) for spec in specs(rng, rng.choice((0, 0, 1, 2)), test=test)]
    made = []
    for _ in range(turns):
        value, code = value_of(kind, rng), v.KINDS["code"][1](rng).json
        template = rng.choice(("{} of {}.", "{} that belongs to {}.", "{} from {}.", "{} of {}, please."))
        text = template.format(rng.choice(ASKS[verb]).format(thing), value.said)
        found = {key: code} if rng.random() < 0.7 else {by: value.json, key: code}
        calls = [_call(first, first.names[by], argument(first, find.parameters[0], value))]
        if rng.random() < 0.15:
            error = failed(rng)
            made.append(Turn(text, "", calls, "dialog", steps=[Step([_tool(error)], error.said)]))
            continue
        next_calls = [_call(second, second.names[key], code)]
        steps, _ = _answered(next_calls, rng)
        looked_up = Result(json.dumps(found), "")
        made.append(Turn(text, "", calls, "dialog", steps=[Step([_tool(looked_up)], "", next_calls), *steps]))
    tools = [first, second, *others]
    rng.shuffle(tools)
    return tools, made


def _call(tool: Offered, parameter: str, value: Any) -> _Call:
    return {"name": tool.schema["function"]["name"], "arguments": {parameter: value}}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _tool(result: Result) -> dict[str, Any]:
    return {"role": "tool", "content": result.text}
