"""Any task of lm-evaluation-harness, through its `local-completions` and `local-chat-completions` models.

A task is named `completions:TASK` or `chat:TASK`; log-likelihood tasks need completions. Every sample of a
task is an outcome, so intervals, comparisons and failing cases are the same as in other suites.
"""

import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from anyio import to_thread

from personae.errors import RequestError, RequestFailed
from personae.evals.harness.subject import Subject
from personae.evals.suites.suite import FREE, Case, Outcome, Skipped, Suite, SuiteSettings

OWN = Path(__file__).parent / "lm_eval_tasks"
OWN_TASKS = ("completions:personae_which_tool", "completions:personae_repeat", "chat:personae_extract")


class LmEvalSettings(SuiteSettings, frozen=True):
    """tasks: what to run; without it three of our own. include: a folder of additional task files. count:
    samples per task, 0 for all. tokenizer: a folder or name in transformers' form; without it that of our own
    engine's model. tokenized: whether prompts are sent as token ids. length: the context. requests: how many
    at a time."""

    tasks: tuple[str, ...] = OWN_TASKS
    include: str = ""
    count: int = 0
    tokenizer: str = ""
    tokenized: bool = True
    length: int = 2048
    requests: int = 8


class LmEval(Suite):
    """One case per task."""

    settings: ClassVar = LmEvalSettings
    about: ClassVar = "tasks of lm-evaluation-harness (needs lm-eval[api])"
    modes: ClassVar = (FREE,)
    concurrency: ClassVar = 1

    def __init__(self, settings: LmEvalSettings) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise RequestError("Suite 'lm_eval' needs the package lm-eval[api].", param="suites")
        self._settings = settings

    def cases(self) -> Sequence[Case]:
        """The tasks."""
        cases = []
        for name in self._settings.tasks:
            kind, _, task = name.rpartition(":")
            if kind not in ("", "completions", "chat"):
                raise RequestError(f"`{name}`: a task is completions:NAME or chat:NAME.", param="tasks")
            cases.append(Case(name, task, (kind or "completions", task)))
        return cases

    def plays(self, case: Case, model: str, mode: str, *, base: bool) -> bool:
        """Every model plays everything."""
        return mode == FREE

    async def play(self, case: Case, subject: Subject) -> Sequence[Outcome]:
        """The task's metrics from 0 to 1 are scores, the others values. The first score decides whether it
        passes."""
        if subject.target.url is None:
            raise Skipped("lm-evaluation-harness asks over HTTP: run with --url or --serve")
        tokenizer = self._settings.tokenizer
        if not tokenizer and subject.target.source is not None:
            tokenizer = str(subject.target.source.model)
        kind, task = case.data
        if kind == "completions" and not tokenizer:
            raise Skipped("it counts tokens: --set lm_eval.tokenizer=… says which tokenizer")
        samples = await to_thread.run_sync(self._evaluate, kind, task, subject, tokenizer)
        return [_outcome(sample) for sample in samples]

    def _evaluate(self, kind: str, task: str, subject: Subject, tokenizer: str) -> list[dict[str, Any]]:
        os.environ.setdefault("TQDM_DISABLE", "1")  # the progress display is ours
        from lm_eval import evaluator, simple_evaluate

        evaluator.get_git_commit_hash = lambda: None  # git prints an error where the folder is no repository

        for name in ("lm_eval", "datasets", "httpx"):
            logging.getLogger(name).setLevel(logging.ERROR)
        path = "completions" if kind == "completions" else "chat/completions"
        arguments: dict[str, Any] = {
            "model": subject.model,
            "base_url": f"{subject.target.url}/v1/{path}",
            "num_concurrent": self._settings.requests,
            "max_length": self._settings.length,
            "header": {"Authorization": f"Bearer {subject.target.key or 'none'}"},
        }
        if kind == "completions":
            arguments |= {
                "tokenizer_backend": "huggingface",
                "tokenizer": tokenizer,
                "tokenized_requests": self._settings.tokenized,
            }
        try:
            found = simple_evaluate(
                model="local-completions" if kind == "completions" else "local-chat-completions",
                model_args=arguments,
                tasks=[task],
                task_manager=_task_manager(task, self._settings.include),
                limit=self._settings.count or None,
                apply_chat_template=kind == "chat",
                gen_kwargs={"temperature": subject.sampling["temperature"]},
                bootstrap_iters=0,
            )
        except (KeyError, ValueError, NotImplementedError) as error:
            said = (
                error.args[0] if error.args else type(error).__name__
            )  # a KeyError's str has quotes around it
            raise RequestFailed(f"lm-evaluation-harness: {said}") from error
        return [sample for samples in found["samples"].values() for sample in samples]


def _task_manager(task: str, include: str) -> Any:
    """The task manager that knows this task. The harness takes most of a minute to read its own thousands of
    task files. So it reads them only for a task that neither we nor the `include` folder define; a group may
    need any of them."""
    from lm_eval.tasks import TaskManager

    folders = [str(OWN), *([include] if include else [])]
    small = TaskManager(include_path=folders, include_defaults=False)
    return small if task in small.all_subtasks else TaskManager(include_path=folders)


def _outcome(sample: dict[str, Any]) -> Outcome:
    found = {name: sample[name] for name in sample["metrics"] if isinstance(sample[name], int | float)}
    scores = {name: float(value) for name, value in found.items() if 0.0 <= value <= 1.0}
    arguments = sample["arguments"]
    first = next(iter(arguments.values())) if isinstance(arguments, dict) else arguments[0]
    prompt = next(iter(first.values())) if isinstance(first, dict) else first[0]
    return Outcome(
        passed=next(iter(scores.values()), 0.0) >= 1.0,
        scores=scores,
        values={name: float(value) for name, value in found.items() if name not in scores},
        prompt=str(prompt),
        expected=str(sample["target"]),
        answer="\n".join(str(answer) for answer in sample["filtered_resps"]),
    )
