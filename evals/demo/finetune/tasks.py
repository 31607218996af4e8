"""The tasks by name: what draws a scene of each."""

from collections.abc import Callable

from personae.evals.demo.finetune import extract, sql, tools, triage, verse
from personae.evals.demo.finetune.scene import Scene

GENERATORS: dict[str, Callable[..., Scene]] = {
    "tools": tools.scene,
    "extract": extract.scene,
    "sql": sql.scene,
    "triage": triage.scene,
    "verse": verse.scene,
}
