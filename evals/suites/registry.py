"""The suites by name. A suite's module is imported when it is first used."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import get_origin

import msgspec

from personae.errors import RequestError
from personae.evals.suites.suite import Suite

SUITES = {
    "finetuned": "personae.evals.suites.finetuned:Finetuned",
    "tool_loops": "personae.evals.suites.tool_loops:ToolLoops",
    "demo": "personae.evals.suites.demo:DemoTasks",
    "schemas": "personae.evals.suites.schemas:Schemas",
    "bfcl": "personae.evals.suites.bfcl.suite:Bfcl",
    "reasoning": "personae.evals.suites.reasoning:Reasoning",
    "lora": "personae.evals.suites.lora:LoraParity",
    "determinism": "personae.evals.suites.determinism:Determinism",
    "acceptance": "personae.evals.suites.acceptance:Acceptance",
    "adversarial": "personae.evals.suites.adversarial:Adversarial",
    "entrypoints": "personae.evals.suites.entrypoints.suite:Entrypoints",
    "lm_eval": "personae.evals.suites.lm_eval:LmEval",
}

Settings = dict[str, str]
"""The settings of one suite, as text."""

ANY_MODEL = ("schemas", "bfcl", "reasoning", "lora", "determinism", "acceptance")
DEMO = ("demo", *ANY_MODEL)
SMOLLM2: dict[str, Settings] = {
    "finetuned": {"count": "20"},
    "tool_loops": {"models": "tools"},
    "bfcl": {"models": "base,tools", "limit": "256"},
    "schemas": {"models": "base,extract"},
    "lora": {"tolerance": "0.4"},
    "determinism": {"models": "base,tools", "requests": "3", "others": "12"},
    "acceptance": {},
}
"""Chosen so that a run takes less than a quarter of an hour on two cores: docs/guide/evals.md."""
FINETUNED = frozenset({"tools", "extract", "sql", "triage", "verse"})


def default_suites(models: Sequence[str]) -> dict[str, Settings]:
    """The suites that run if none is named, by the names of the served models."""
    if set(models) >= FINETUNED:
        return {name: dict(settings) for name, settings in SMOLLM2.items()}
    return {name: {} for name in (DEMO if "personae-demo" in models else ANY_MODEL)}


def suite_type(name: str) -> type[Suite]:
    """The class of that name. Raises RequestError if there is none, or a package that it needs is not
    installed."""
    if name not in SUITES:
        raise RequestError(f"There is no suite {name!r}; there are {', '.join(SUITES)}.", param="suites")
    module, _, attribute = SUITES[name].partition(":")
    try:
        suite: type[Suite] = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise RequestError(f"Suite {name!r} needs the package {error.name!r}.", param="suites") from None
    return suite


def open_suite(name: str, settings: Mapping[str, str]) -> Suite:
    """The suite with these settings, given as text. Raises RequestError, which names the wrong setting."""
    suite = suite_type(name)
    known = {field.name: field.type for field in msgspec.structs.fields(suite.settings)}
    for key in settings:
        if key not in known:
            raise RequestError(
                f"`{name}.{key}`: suite {name!r} has no such setting; it has {', '.join(known) or 'none'}.",
                param=f"{name}.{key}",
            )
    values = {key: _entries(value) if _is_list(known[key]) else value for key, value in settings.items()}
    try:
        return suite(msgspec.convert(values, suite.settings, strict=False))  # type: ignore[call-arg]  # see Suite
    except msgspec.ValidationError as error:
        raise RequestError(f"Settings of suite {name!r}: {error}.", param=name) from None


def _is_list(kind: object) -> bool:
    return get_origin(kind) in (list, tuple)


def _entries(text: str) -> list[str]:
    return [entry for entry in text.split(",") if entry]
