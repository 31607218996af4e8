"""Asks a running server the held-out questions and writes down what was right. What is written is not asked again.

    personae serve DIR --adapters evals/demo/smollm2 --port 8000
    python -m personae.evals.demo.finetune.score tools --url http://127.0.0.1:8000 --count 100 --out results
    python -m personae.evals.demo.finetune.score bfcl --url … --data …/bfcl_v4 --count 50 --out results

Each question is asked four times: the base and the adapter, free and bound. Free is the same prompt without a
grammar: tools stand in a system message, as the generic format writes it, and no field binds the answer.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import httpx

from personae.api.generic_tools import describe
from personae.evals.demo.finetune import sql, verse
from personae.evals.demo.finetune.scene import Scene, Turn
from personae.evals.demo.finetune.tasks import GENERATORS
from personae.evals.suites.bfcl.schema import tool
from personae.evals.suites.bfcl.suite import judge, read_entries

SEED = "held out 1"
CATEGORIES = ("simple_python", "multiple", "live_simple", "irrelevance", "parallel", "live_multiple")
VARIANTS = ("base free", "base bound", "adapter free", "adapter bound")
LIMIT = 256
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Question(NamedTuple):
    """One question: `part` is the line of the card that it counts in, `judge` says what is right of an answer."""

    id: str
    part: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    bound: dict[str, Any]
    turn: Any

    def body(self, *, bound: bool) -> dict[str, Any]:
        """The request, without the model."""
        if bound:
            tools = {"tools": [_strict(one) for one in self.tools]} if self.tools else {}
            return {"messages": self.messages, **tools, **self.bound}
        if not self.tools:
            return {"messages": self.messages}
        own = [one["content"] for one in self.messages if one["role"] == "system"]
        system = "\n\n".join([*own, describe(self.tools)])
        rest = [one for one in self.messages if one["role"] != "system"]
        return {"messages": [{"role": "system", "content": system}, *rest]}


def _strict(one: dict[str, Any]) -> dict[str, Any]:
    """The tool as OpenAI's strict mode wants it: objects have no other properties than those listed."""
    function = one["function"]
    return {**one, "function": {**function, "strict": True, "parameters": _closed(function["parameters"])}}


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    if isinstance(made.get("properties"), dict):
        made["properties"] = {name: _closed(value) for name, value in made["properties"].items()}
        made["additionalProperties"] = False
    if isinstance(made.get("items"), dict):
        made["items"] = _closed(made["items"])
    return made


def held_out(task: str, count: int) -> Iterator[Question]:
    """The questions of a task's held-out split."""
    rng = random.Random(f"{SEED} {task}")
    for number in range(count):
        scene: Scene = GENERATORS[task](rng, test=True, turns=1)
        turn = scene.turns[0]
        bound: dict[str, Any] = {}
        if scene.schema is not None:
            shape = {"name": "answer", "strict": True, "schema": scene.schema}
            bound = {"response_format": {"type": "json_schema", "json_schema": shape}}
        elif task == "sql":
            bound = {"structured_outputs": {"regex": r"SELECT [^;\n]{1,300};"}}
        elif task == "verse":
            bound = {"structured_outputs": {"regex": r"[A-Z][^\n]{10,70},\n[a-z][^\n]{10,70}\."}}
        yield Question(
            f"{task}/{number:04}", turn.kind or task, scene.messages(turn), scene.tools, bound, turn
        )


def leaderboard(data: Path, count: int, categories: Sequence[str]) -> Iterator[Question]:
    """Questions of the leaderboard: a sample drawn by a seed."""
    for category in categories:
        entries = read_entries(data, category)
        random.Random(SEED).shuffle(entries)
        answers = {}
        if "irrelevance" not in category:
            answers = {
                one["id"]: one["ground_truth"] for one in read_entries(data / "possible_answer", category)
            }
        for entry in entries[:count]:
            tools = [tool(function, category, strict=False) for function in entry["function"]]
            facts = (category, entry["function"], answers.get(entry["id"], []))
            yield Question(entry["id"], category, entry["question"][0], tools, {"tool_choice": "auto"}, facts)


def calls_of(message: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The calls of an answer, bound or free; None if what should be one is none."""
    written = message.get("tool_calls") or []
    pairs = [(one["function"]["name"], one["function"]["arguments"]) for one in written]
    try:
        if not written:
            found = [json.loads(text) for text in _CALL.findall(message.get("content") or "")]
            return [{"name": one["name"], "arguments": one["arguments"]} for one in found]
        return [{"name": name, "arguments": json.loads(arguments)} for name, arguments in pairs]
    except (ValueError, KeyError, TypeError):
        return None


def grade(question: Question, message: dict[str, Any]) -> dict[str, float]:
    """`right`, and what else is counted of the task."""
    text = message.get("content") or ""
    if isinstance(question.turn, tuple):
        category, functions, answers = question.turn
        calls = calls_of(message)
        said = [
            {"function": {"name": one["name"], "arguments": json.dumps(one["arguments"])}}
            for one in calls or []
        ]
        return {"right": float(calls is not None and judge(category, functions, answers, said) is None)}
    turn: Turn = question.turn
    task = question.id.partition("/")[0]
    if task == "tools":
        return _tools(turn, calls_of(message))
    if task == "sql":
        return {"right": float(sql.right(text, turn))}
    if task == "verse":
        return {"right": float(verse.right(text, turn))}
    return _record(turn, text)


def _tools(turn: Turn, calls: list[dict[str, Any]] | None) -> dict[str, float]:
    names = sorted(one["name"] for one in turn.calls)
    named = calls is not None and sorted(str(one["name"]) for one in calls) == names
    return {"right": float(named and _sorted(calls or []) == _sorted(turn.calls)), "tool": float(named)}


def _sorted(calls: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(_plain(one), sort_keys=True) for one in calls)


def _plain(value: Any) -> Any:
    """A number that is whole is whole, however it is written."""
    if isinstance(value, float) and value == int(value):
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


async def ask_all(
    url: str,
    questions: Sequence[Question],
    variants: Sequence[str],
    base: str,
    adapter: str,
    out: Path,
    at_once: int,
) -> None:
    """Asks what is not in the file yet."""
    done = {(row["id"], row["variant"]) for row in read_rows(out)}
    todo = [(v, q) for v in variants for q in questions if (q.id, v) not in done]
    limit, written = anyio.CapacityLimiter(at_once), out.open("a", encoding="utf-8")
    with written:
        async with (
            httpx.AsyncClient(base_url=url, timeout=1200) as client,
            anyio.create_task_group() as group,
        ):

            async def one(variant: str, question: Question) -> None:
                async with limit:
                    who, how = variant.split()
                    body = {
                        "model": base if who == "base" else adapter,
                        "max_tokens": LIMIT,
                        "temperature": 0,
                        **question.body(bound=how == "bound"),
                    }
                    response = await client.post("/v1/chat/completions", json=body)
                row: dict[str, Any] = {"id": question.id, "part": question.part, "variant": variant}
                if response.status_code == 200:
                    message = response.json()["choices"][0]["message"]
                    calls = message.get("tool_calls")
                    said = (
                        json.dumps([call["function"] for call in calls]) if calls else message.get("content")
                    )
                    row |= {"scores": grade(question, message), "answer": said}
                elif response.status_code == 400:
                    row |= {"scores": {"right": 0.0}, "refused": response.json()["error"]["message"]}
                else:
                    response.raise_for_status()
                written.write(json.dumps(row, ensure_ascii=False) + "\n")
                written.flush()

            for variant, question in todo:
                group.start_soon(one, variant, question)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What has been written down."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=[*sorted(GENERATORS), "bfcl"])
    parser.add_argument("--url", required=True)
    parser.add_argument(
        "--count", type=int, default=100, help="questions; of each category, for the leaderboard"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--data", type=Path, help="folder of the leaderboard's files")
    parser.add_argument("--categories", default=",".join(CATEGORIES))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--base", required=True, help="the base's name at the server")
    parser.add_argument("--adapter", help="the adapter's name there, else the task's")
    parser.add_argument("--at-once", type=int, default=16)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.task == "bfcl":
        if given.data is None:
            parser.error("the leaderboard needs --data")
        questions = list(leaderboard(given.data, given.count, given.categories.split(",")))
    else:
        questions = list(held_out(given.task, given.count))
    adapter = given.adapter or ("tools" if given.task == "bfcl" else given.task)
    path = given.out / f"{given.task}.jsonl"
    anyio.run(
        ask_all, given.url, questions, given.variants.split(","), given.base, adapter, path, given.at_once
    )


if __name__ == "__main__":
    main()
