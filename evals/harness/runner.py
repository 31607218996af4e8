"""Plays every case with every model in every mode, some at the same time, and writes the outcomes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio

from personae.errors import PersonaeError, RequestError
from personae.evals.harness.records import Key, Log, OutcomeRecord, key_of
from personae.evals.harness.subject import Subject
from personae.evals.harness.target import Body, Target, TargetModel
from personae.evals.suites.suite import Case, Skipped, Suite

OnRecord = Callable[[OutcomeRecord], None]


@dataclass(frozen=True, slots=True)
class Play:
    """One case for one model in one mode with one seed."""

    case: Case
    model: TargetModel
    mode: str
    seed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The plays of one suite."""

    name: str
    suite: Suite
    plays: tuple[Play, ...]

    @property
    def tasks(self) -> list[str]:
        """The rows of the report."""
        return list(dict.fromkeys(play.case.task for play in self.plays))

    def key(self, play: Play) -> Key:
        """The key of a play's record."""
        return self.name, play.case.id, play.model.name, play.mode, play.seed


def choose_models(served: Sequence[TargetModel], asked: Sequence[str]) -> list[TargetModel]:
    """The named models, or by default the base and its adapters. "base" is the first base.

    Raises RequestError for an unknown name, or if there are several bases and none was chosen: playing
    everything with every model of a vendor is hardly intended.
    """
    bases = [model.name for model in served if model.base]
    if not asked:
        if len(bases) > 1:
            raise RequestError(
                f"There are {len(bases)} base models; `--models` says which: {', '.join(bases[:20])}.",
                param="models",
            )
        return list(served)
    by_name = {model.name: model for model in served}
    base = next((model for model in served if model.base), None)
    if base is not None:
        by_name.setdefault("base", base)
    for name in asked:
        if name not in by_name:
            raise RequestError(
                f"There is no model {name!r} there; there are {', '.join(by_name)}.", param="models"
            )
    return list(dict.fromkeys(by_name[name] for name in asked))


def plan(
    name: str,
    suite: Suite,
    models: Sequence[TargetModel],
    *,
    modes: Sequence[str] = (),
    tasks: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
) -> Plan:
    """Every combination that the suite supports. Empty `modes` and `tasks` mean its default modes and all
    tasks."""
    plays = tuple(
        Play(case, model, mode, seed)
        for case in suite.cases()
        if not tasks or case.task in tasks
        for model in models
        for mode in modes or suite.modes
        if suite.plays(case, model.name, mode, base=model.base)
        for seed in seeds
    )
    return Plan(name, suite, plays)


async def run(
    plan: Plan, target: Target, log: Log, *, sampling: Body, concurrency: int, on_record: OnRecord
) -> None:
    """Play everything that the log does not have yet, at most `concurrency` at a time."""
    waiting = iter([play for play in plan.plays if plan.key(play) not in log.done])
    width = min(concurrency, plan.suite.concurrency or concurrency)
    async with anyio.create_task_group() as tasks:
        for _ in range(width):
            tasks.start_soon(_work, plan, waiting, target, log, sampling, on_record)


async def _work(
    plan: Plan, waiting: Iterator[Play], target: Target, log: Log, sampling: Body, on_record: OnRecord
) -> None:
    for play in waiting:
        records = await _play(plan, play, target, sampling)
        log.add(records)
        assert all(key_of(record) == plan.key(play) for record in records)
        for record in records:
            on_record(record)


async def _play(plan: Plan, play: Play, target: Target, sampling: Body) -> list[OutcomeRecord]:
    case, model = play.case, play.model
    subject = Subject(target, model.name, model.base, play.mode, {**sampling, "seed": play.seed})
    record = OutcomeRecord(
        suite=plan.name, task=case.task, case=case.id, model=model.name, mode=play.mode, seed=play.seed
    )
    begun = time.perf_counter()
    try:
        outcomes = await plan.suite.play(case, subject)
    except Skipped as reason:
        record.skipped = str(reason)
        return [record]
    except PersonaeError as error:
        record.error = f"{type(error).__name__}: {error.message}"
        return [record]
    except Exception as error:  # an error in one case must not end the others
        record.error = f"{type(error).__name__}: {error}"
        return [record]
    finally:
        record.seconds = round(time.perf_counter() - begun, 4)
    records = []
    for part, outcome in enumerate(outcomes):
        records.append(
            OutcomeRecord(
                suite=record.suite,
                task=record.task,
                case=record.case,
                model=record.model,
                mode=record.mode,
                seed=record.seed,
                part=part,
                passed=outcome.passed,
                scores=outcome.scores,
                values=outcome.values,
                prompt=outcome.prompt,
                expected=outcome.expected,
                answer=outcome.answer,
                note=outcome.note,
                seconds=round((time.perf_counter() - begun) / len(outcomes), 4),
                prompt_tokens=0 if part else subject.usage.prompt,
                completion_tokens=0 if part else subject.usage.completion,
            )
        )
    return records
