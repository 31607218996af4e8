"""Writes an adapter's model card, README.md beside its weights, from the results and the training's log.

python -m personae.evals.demo.finetune.card --results results --runs runs --adapters evals/demo/smollm2
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from personae.evals.demo.finetune.score import CATEGORIES, read_rows
from personae.evals.demo.finetune.tasks import GENERATORS
from personae.evals.harness.statistics import wilson

Rows = list[dict[str, Any]]
ORDER = ("base free", "base bound", "adapter free", "adapter bound", "PEFT free")
ABOUT = {
    "tools": "Chooses among one to eight tools that training never showed, fills their arguments, makes several calls "
    "where several are asked for, and answers in text where no tool fits.",
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
    """A share in percent with its 95 % interval; a dash without rows."""
    values = [row["scores"][score] for row in rows if score in row["scores"]]
    if not values:
        return "–"
    found = wilson(sum(values), len(values))
    return f"{100 * found.share:.0f} % ({100 * found.low:.0f}–{100 * found.high:.0f})"


def table(rows: Rows, parts: list[tuple[str, str, str]]) -> str:
    """Lines: part, score, title. Columns: the variants."""
    variants = [variant for variant in ORDER if any(row["variant"] == variant for row in rows)]
    counts: dict[str, int] = defaultdict(int)
    for row in rows:
        counts[row["variant"]] += 1
    lines = ["| | " + " | ".join(variants) + " |", "|---" * (len(variants) + 1) + "|"]
    for part, score, title in parts:
        chosen = [row for row in rows if not part or row["part"] == part]
        cells = [share([row for row in chosen if row["variant"] == variant], score) for variant in variants]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    lines.append("| questions | " + " | ".join(str(counts[variant]) for variant in variants) + " |")
    return "\n".join(lines)


def card(task: str, rows: Rows, board: Rows, log: list[dict[str, Any]], config: dict[str, Any]) -> str:
    """The card's text."""
    parts = [("", "right", "right")]
    if task == "tools":
        parts += [("", "tool", "right tools")] + [
            (part, "right", f"right: {name}") for part, name in PARTS.items()
        ]
    if task in ("extract", "triage"):
        parts.append(("", "fields", "fields"))
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
        table(rows, parts),
    ]
    if board:
        text += [
            "## Berkeley Function-Calling Leaderboard v4",
            "A sample of the questions, drawn by a seed; no question of the leaderboard was trained on. `tool_choice` is "
            "`auto`. The number of questions is that of all categories together.",
            table(
                board,
                [
                    (name, "right", f"`{name}`")
                    for name in CATEGORIES
                    if any(r["part"] == name for r in board)
                ],
            ),
        ]
    text += [
        "## Training",
        f"Rank {config['r']}, alpha {config['lora_alpha']}, all seven linear layers; {log[-1]['step'] if log else '?'} "
        f"steps of AdamW in bfloat16, {tokens:,} tokens in all (what questions share is counted once), mean loss of "
        f"an answer's token over the last ten steps {loss:.3f}. All data are made by the scripts of this repository.",
    ]
    return "\n\n".join(text) + "\n"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    given = parser.parse_args()
    for task in GENERATORS:
        folder = given.adapters / task
        if not folder.exists():
            continue
        board = read_rows(given.results / "bfcl.jsonl") if task == "tools" else []
        steps = {line["step"]: line for line in read_rows(given.runs / task / "log.jsonl")}
        log = [steps[number] for number in sorted(steps)]
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        made = card(task, read_rows(given.results / f"{task}.jsonl"), board, log, config)
        (folder / "README.md").write_text(made, encoding="utf-8")


if __name__ == "__main__":
    main()
