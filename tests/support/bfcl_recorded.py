"""Recorded outputs, and the verdicts of the leaderboard's own package on them.

    python tests/support/bfcl_recorded.py BFCL_EVAL_FOLDER [DATA]

This writes bfcl_verdicts.json in this folder, for our sample. The argument is the folder where `pip install
--no-deps --target FOLDER bfcl-eval` put the package: with its dependencies, among them an old NumPy, it
cannot be installed in our environment. DATA is another folder of entries: then nothing is written, only
compared.
"""

import copy
import json
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from personae.evals.suites.bfcl.suite import CATEGORIES, SAMPLE, judge, read_entries

VERDICTS = Path(__file__).with_name("bfcl_verdicts.json")
VERSION = "bfcl-eval 2026.3.23"
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
                yield category, entry, gold, calls


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
    """Make the choices inside an accepted value."""
    if isinstance(value, dict):
        wanted = {key: [v for v in choices if v != ""] for key, choices in value.items() if choices}
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


def ours(category: str, entry: dict[str, Any], gold: Any, calls: Calls) -> bool:
    """Our verdict, given the tool calls of an answer."""
    said = [
        {"function": {"name": name, "arguments": json.dumps(given)}}
        for call in calls
        for name, given in call.items()
    ]
    return judge(category, entry["function"], gold, said) is None


def theirs(folder: Path) -> Callable[[str, dict[str, Any], Any, Calls], bool | None]:
    """The package's verdicts; None where it crashes."""
    sys.path.insert(0, str(folder))
    # Its table of models imports every vendor's client; only this one flag is needed.
    table = types.ModuleType("bfcl_eval.constants.model_config")
    flag = types.SimpleNamespace(underscore_to_dot=True)
    table.MODEL_CONFIG_MAPPING = {"ours": flag}  # type: ignore[attr-defined]  # a module made here
    sys.modules["bfcl_eval.constants.model_config"] = table
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    def verdict(category: str, entry: dict[str, Any], gold: Any, calls: Calls) -> bool | None:
        if "relevance" in category:
            return bool(calls) is ("irrelevance" not in category)
        language = (
            Language.JAVASCRIPT
            if "javascript" in category
            else Language.JAVA
            if "java" in category
            else Language.PYTHON
        )
        calls = json.loads(json.dumps(calls))  # as the package expects them: lists, not tuples
        try:
            found = ast_checker(entry["function"], calls, gold, language, category, "ours")
        except Exception:
            return None
        return bool(found["valid"])

    return verdict


def main() -> None:
    verdict = theirs(Path(sys.argv[1]))
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else SAMPLE
    verdicts = {}
    count = wrong = crashed = 0
    for number, (category, entry, gold, calls) in enumerate(recorded(folder)):
        found = verdict(category, entry, gold, calls)
        verdicts[f"{entry['id']}:{number}"] = {"calls": json.loads(json.dumps(calls)), "valid": found}
        if found is None:
            crashed += 1
            continue
        count += 1
        if ours(category, entry, gold, calls) is not found:
            wrong += 1
            print(entry["id"], found, json.dumps(calls), json.dumps(gold), sep="\n  ")
    print(f"{count} verdicts, {wrong} differ from ours; on {crashed} more the package crashes")
    if folder == SAMPLE:
        whole = {"of": VERSION, "verdicts": verdicts}
        VERDICTS.write_text(json.dumps(whole, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    main()
