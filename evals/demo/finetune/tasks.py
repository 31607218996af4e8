"""The tasks by name: what draws a scene of each."""

from collections.abc import Callable

from personae.evals.demo.finetune import dialogs, extract, sql, tools, triage, verse
from personae.evals.demo.finetune.scene import Scene

GENERATORS: dict[str, Callable[..., Scene]] = {
    "tools": tools.scene,
    "extract": extract.scene,
    "sql": sql.scene,
    "triage": triage.scene,
    "verse": verse.scene,
}
TRAINED = GENERATORS | {"tools": dialogs.mixed}
"""What a task is trained on. The held-out questions of `tools` are single ones; `loops` measures conversations."""
