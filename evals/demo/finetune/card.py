"""Writes an adapter's model card, README.md next to its weights, from runs of `personae eval` and the training's log.

    python -m personae.evals.demo.finetune.card RUN… --runs runs --adapters evals/demo/smollm2

The runs have the suites `finetuned`, `tool_loops` and `bfcl` in any order. If several have the same case, the last one counts.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from personae.api.eval_reports.statistics import wilson
from personae.evals.demo.finetune.tasks import GENERATORS
from personae.evals.harness.records import Key, OutcomeRecord, key_of, read_run
from personae.evals.suites.bfcl.suite import CATEGORIES
from personae.evals.suites.finetuned import TRANSFORMERS
from personae.evals.suites.suite import CONSTRAINED, FREE

Rows = Sequence[OutcomeRecord]
COLUMNS = {
    "base free": (False, FREE),
    "base bound": (False, CONSTRAINED),
    "adapter free": (True, FREE),
    "adapter bound": (True, CONSTRAINED),
    "PEFT free": (True, TRANSFORMERS),
}
"""Title of each column: whether it is the adapter's, and the mode."""
ABOUT = {
    "tools": "Chooses among one to eight tools that training never showed, fills their arguments, makes several calls "
    "where several are asked for, says what their results are, goes on with further questions, and answers in text "
    "where no tool fits.",
    "extract": "Turns a text and a JSON Schema, neither of which training showed, into JSON.",
    "sql": "Turns `CREATE TABLE` statements and a question into one SQLite query.",
    "triage": "Turns a support mail into a ticket with six fields.",
    "verse": "Answers in two lines that rhyme.",
}
HOW = {
    "tools": "Unseen tools; *right* is every call with every argument and none besides, or no call where no tool fits. "
    "*bound*: `tools` with `strict`, `tool_choice` is `auto`.",
    "extract": "Unseen kinds of documents; *right* is the whole record, *fields* the share of fields that are exact. "
    "*bound*: `response_format` with the schema.",
    "sql": "Unseen tables; *right* is a query that gives, in SQLite, the rows that the reference query gives. "
    "*bound*: to one line that begins with `SELECT` and ends with a semicolon.",
    "triage": "Unseen wordings and products; *right* is the whole ticket, *fields* the share of fields that are exact. "
    "*bound*: `response_format` with the ticket's schema. The system message names the fields and their values.",
    "verse": "Unseen topics and questions; *right* is two lines that rhyme, the first of which names the topic. "
    "*bound*: to two lines by a regular expression.",
}
PARTS = {"one": "one call", "same": "calls of one tool", "two": "calls of two tools", "none": "no tool fits"}


def share(rows: Rows, score: str) -> str:
    """A share in percent, never rounded up, with its 95 % interval; a dash without rows. Without a score's name,
    what passed."""
    values = [row.scores.get(score, 0.0) if score else float(row.passed) for row in rows]
    if not values:
        return "–"
    found = wilson(sum(values), len(values))
    return f"{math.floor(100 * found.share + 1e-9)} % ({100 * found.low:.0f}–{100 * found.high:.0f})"


def table(rows: Rows, adapter: str, lines: Sequence[tuple[str, str, str]]) -> str:
    """`lines` are the end of a case's id, or its task, then score and title."""
    columns = {
        title: found
        for title, (own, mode) in COLUMNS.items()
        if (found := [row for row in rows if (row.model == adapter) == own and row.mode == mode])
    }
    made = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for part, score, title in lines:
        cells = [
            share(
                [row for row in found if not part or row.case.endswith(f"/{part}") or row.task == part], score
            )
            for found in columns.values()
        ]
        made.append(f"| {title} | " + " | ".join(cells) + " |")
    made.append("| questions | " + " | ".join(str(len(found)) for found in columns.values()) + " |")
    return "\n".join(made)


LOOPS = {"result": "a result", "error": "an error", "several": "two calls at once", "further": "further questions",
         "rounds": "calls in several rounds"}  # fmt: skip


def card(
    task: str,
    rows: Rows,
    loops: Rows,
    board: Rows,
    log: list[dict[str, Any]],
    config: dict[str, Any],
    began: str,
) -> str:
    """The card's text, from the task's outcomes and, for `tools`, those of conversations and the leaderboard's."""
    lines = [("", "", "right")]
    if task == "tools":
        lines += [
            ("", "tool", "right tools"),
            *((part, "", f"right: {name}") for part, name in PARTS.items()),
        ]
    if task in ("extract", "triage"):
        lines.append(("", "fields", "fields"))
    last = log[-10:]
    loss = sum(line["loss"] for line in last) / max(1, len(last))
    tokens = sum(line["tokens"] for line in log)
    text = [
        "---\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\nlibrary_name: peft\nlicense: apache-2.0\n---",
        f"# `{task}`: a LoRA adapter of SmolLM2-135M-Instruct",
        ABOUT[task],
        "Written by `evals/demo/finetune/card.py`; what the figures mean and how to train on is in "
        "[docs/guide/real_model.md](../../../../docs/guide/real_model.md).",
        "## Held-out questions",
        HOW[task] + " Through Personae's server in bfloat16, greedy; 95 % intervals (Wilson's) in brackets. "
        "*PEFT free* is the adapter through plain transformers and PEFT in bfloat16, on the first questions of the same.",
        table(rows, task, lines),
    ]
    if loops:
        text += [
            "## Conversations",
            "Twenty conversations that training never showed (the suite `tool_loops`): every call is right, and the "
            "answers say what the results say.",
            table(loops, task, [("", "", "right"), *((name, "", title) for name, title in LOOPS.items())]),
        ]
    if board:
        categories = [name for name in CATEGORIES if any(row.task == name for row in board)]
        text += [
            "## Berkeley Function-Calling Leaderboard v4",
            "A sample of the questions, drawn by a seed; no question of the leaderboard was trained on. *bound*: `tools` "
            "with `strict`, `tool_choice` is `auto`. The number of questions is that of all categories together.",
            table(board, task, [(name, "", f"`{name}`") for name in categories]),
        ]
    text += [
        "## Training",
        f"{began}Rank {config['r']}, alpha {2 * config['r']}, all seven linear layers; {log[-1]['step'] if log else '?'} "
        f"steps of AdamW in bfloat16, {tokens:,} tokens in all (what questions share is counted once), mean loss of "
        f"an answer's token over the last ten steps {loss:.3f}. All data are made by the scripts of this repository. "
        "The weights are packed into float8 (`evals/demo/finetune/pack.py`).",
    ]
    return "\n\n".join(text) + "\n"


def outcomes(runs: Sequence[Path]) -> dict[str, list[OutcomeRecord]]:
    """What was judged, by suite."""
    found: dict[Key, OutcomeRecord] = {}
    for run in runs:
        found |= {key_of(record): record for record in read_run(run).records if record.judged}
    by_suite: dict[str, list[OutcomeRecord]] = {}
    for record in found.values():
        by_suite.setdefault(record.suite, []).append(record)
    return by_suite


def read_log(path: Path) -> list[dict[str, Any]]:
    """The training's steps in order; one that was done again counts as it was the last time."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    steps = {line["step"]: line for line in lines}
    return [steps[number] for number in sorted(steps)]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="folders of `personae eval run`")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the training")
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument(
        "--began", default="", help="a sentence: what the training began with, if not with nothing"
    )
    parser.add_argument("--task", choices=list(GENERATORS), action="append", help="else all")
    given = parser.parse_args()
    found = outcomes(given.results)
    for task in given.task or GENERATORS:
        folder = given.adapters / task
        rows = [row for row in found.get("finetuned", ()) if row.task == task]
        board = found.get("bfcl", ()) if task == "tools" else ()
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        loops = found.get("tool_loops", ()) if task == "tools" else ()
        log = read_log(given.runs / task / "log.jsonl")
        made = card(task, rows, loops, board, log, config, given.began and f"{given.began} ")
        (folder / "README.md").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
