"""Recorded outputs, and the verdicts of the leaderboard's own package on them.

    python tests/support/bfcl_recorded.py [DATA]

This writes bfcl_verdicts.json in this folder, for our sample. `pip install --no-deps bfcl-eval` installs the
package: with its dependencies, among them an old NumPy, it cannot be in our environment. DATA is another
folder of entries: then nothing is written, only compared.
"""

import copy
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from personae.evals.suites.bfcl.compare import compare
from personae.evals.suites.bfcl.leaderboard import Verdict, leaderboard
from personae.evals.suites.bfcl.suite import CATEGORIES, SAMPLE, read_entries

VERDICTS = Path(__file__).with_name("bfcl_verdicts.json")
Calls = list[dict[str, Any]]


def recorded(folder: Path) -> Iterator[tuple[str, dict[str, Any], Any, Calls]]:
    """Yield category, entry, answers, and calls as {name: arguments}: right ones, and others with
    mistakes."""
    for category in CATEGORIES:
        answers = {e["id"]: e["ground_truth"] for e in read_entries(folder / "possible_answer", category)}
        for entry in read_entries(folder, category):
            rng = random.Random(entry["id"])
            gold = answers.get(entry["id"])
            if gold is None:
                yield category, entry, [], []
                yield category, entry, [], [{"anything": {"at": "all"}}]
                continue
            for attempt in range(24):
                calls = [right_call(category, entry, answer, rng) for answer in gold]
                if attempt:
                    for _ in range(rng.choice((1, 1, 2))):
                        spoil(calls, rng)
                yield category, entry, gold, json.loads(json.dumps(calls))  # lists, as an answer has them


def right_call(category: str, entry: dict[str, Any], answer: dict[str, Any], rng: random.Random) -> Any:
    [(name, parameters)] = answer.items()
    function = next(f for f in entry["function"] if f["name"] == name)
    given = {}
    for parameter, accepted in parameters.items():
        value = rng.choice(accepted) if accepted else ""
        if value == "" and parameter not in function["parameters"].get("required", ()):
            continue
        value = plain(value)
        if "java" in category:
            kind = function["parameters"]["properties"].get(parameter, {"type": "any"})
            value = literal(value, kind, "javascript" in category)
        given[parameter] = value
    return {name.replace(".", "_"): given}


def plain(value: Any) -> Any:
    """Make the choices inside an accepted value. A few entries have a value where its choices should be."""
    if isinstance(value, dict):
        listed = {key: each if isinstance(each, list) else [each] for key, each in value.items()}
        wanted = {key: [v for v in choices if v != ""] for key, choices in listed.items()}
        return {key: plain(choices[0]) for key, choices in wanted.items() if choices}
    return [plain(entry) for entry in value] if isinstance(value, list) else value


def literal(value: Any, schema: dict[str, Any], engine_spec: bool) -> str:
    """A value in the syntax of Java or JavaScript."""
    kind = schema["type"]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        if engine_spec:
            return json.dumps(value)
        puts = " ".join(f'put("{key}", {json.dumps(entry)});' for key, entry in value.items())
        return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    if isinstance(value, list):
        inner = [literal(entry, schema.get("items", {"type": "any"}), engine_spec) for entry in value]
        if engine_spec:
            return f"[{', '.join(inner)}]"
        if kind == "ArrayList":
            return f"new ArrayList<Object>(Arrays.asList({', '.join(inner)}))"
        return f"new Object[]{{{', '.join(inner)}}}"
    return f"{value}{ {'long': 'L', 'float': 'f', 'Bigint': 'n'}.get(kind, '') }"


def spoil(calls: Calls, rng: random.Random) -> None:
    """Change something. The result may still be right."""
    if not calls:
        return
    call = rng.choice(calls)
    [(name, given)] = call.items()
    kind = rng.randrange(10)
    if kind == 0:
        calls.remove(call)
    elif kind == 1:
        calls.append(copy.deepcopy(call))
    elif kind == 2:
        call[name + "_x"] = call.pop(name)
    elif kind == 3:
        given["unheard_of"] = 1
    elif kind == 4:
        rng.shuffle(calls)
    elif given:
        parameter = rng.choice(list(given))
        if kind == 5:
            del given[parameter]
        else:
            given[parameter] = other(given[parameter], rng)


def other(value: Any, rng: random.Random) -> Any:
    """Return a similar value, of another type or in other words."""
    changes: list[Callable[[], Any]] = [
        lambda: str(value),
        lambda: [value],
        lambda: None,
        lambda: {"name": value},
        lambda: "",
        lambda: "new int[]{1, 2}",
        lambda: "{}",
    ]
    if isinstance(value, str):
        changes += [value.upper, lambda: value.replace(" ", "-"), lambda: f"'{value}'", lambda: value + "s"]
        changes += [lambda: value[:-1], lambda: value + "L", lambda: value.replace('"', "'")]
    elif isinstance(value, int | float):
        changes += [lambda: value + 1, lambda: float(value), lambda: int(value), lambda: bool(value)]
    elif isinstance(value, list):
        changes += [lambda: value[::-1], lambda: value[1:], lambda: [*value, 1], list, lambda: tuple(value)]
        changes += [lambda: [other(entry, rng) for entry in value]]
    elif isinstance(value, dict) and value:
        key = rng.choice(list(value))
        changes += [lambda: {**value, "more": 1}, lambda: {k: v for k, v in value.items() if k != key}]
        changes += [lambda: {**value, key: other(value[key], rng)}]
    return rng.choice(changes)()


def valid(compare: Verdict, category: str, entry: dict[str, Any], gold: Any, calls: Calls) -> bool | None:
    """Whether the calls are right; None where the comparison ends with an error."""
    if "relevance" in category:
        return bool(calls) is ("irrelevance" not in category)
    try:
        return compare(category, entry["function"], calls, gold) is None
    except Exception:
        return None


def main() -> None:
    theirs = leaderboard()
    if theirs is None:
        sys.exit("bfcl-eval is not installed: pip install --no-deps bfcl-eval")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SAMPLE
    verdicts = {}
    found: Counter[bool | None] = Counter()
    wrong = 0
    for number, (category, entry, gold, calls) in enumerate(recorded(folder)):
        verdict = valid(theirs, category, entry, gold, calls)
        verdicts[f"{entry['id']}:{number}"] = {"calls": calls, "valid": verdict}
        found[verdict] += 1
        if verdict is not None and valid(compare, category, entry, gold, calls) is not verdict:
            wrong += 1
            print(entry["id"], verdict, json.dumps(calls), json.dumps(gold), sep="\n  ")
    count = found[True] + found[False]
    print(f"{count} verdicts, {wrong} differ from ours; on {found[None]} more the package crashes")
    if folder == SAMPLE:
        whole = {"of": f"bfcl-eval {version('bfcl-eval')}", "verdicts": verdicts}
        VERDICTS.write_text(json.dumps(whole, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    main()
