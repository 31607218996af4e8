"""The leaderboard's own comparison, where its package `bfcl-eval` is installed."""

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

Verdict = Callable[[str, Sequence[Any], Sequence[Any], Sequence[Any]], str | None]
_MODELS = "bfcl_eval.constants.model_config"


@functools.cache
def leaderboard() -> Verdict | None:
    """The package's comparison, with the meaning of `compare.compare`; None if it is not installed. It raises
    errors of any kind, for example for a Java type that it cannot read."""
    if find_spec("bfcl_eval") is None:
        return None
    ast_checker, language = _imported()

    def verdict(
        category: str, functions: Sequence[Any], calls: Sequence[Any], answers: Sequence[Any]
    ) -> str | None:
        spoken = "JAVASCRIPT" if "javascript" in category else "JAVA" if "java" in category else "PYTHON"
        found = ast_checker(functions, calls, answers, language[spoken], category, "ours")
        return None if found["valid"] else _written(found["error"])

    return verdict


def _imported() -> tuple[Callable[..., Mapping[str, Any]], Any]:
    """The package's comparison and its languages, without its table of models: that imports the client of
    every vendor, and the comparison reads one flag of it."""
    table: Any = ModuleType(_MODELS)
    table.MODEL_CONFIG_MAPPING = {"ours": SimpleNamespace(underscore_to_dot=True)}
    known = sys.modules.get(_MODELS)
    sys.modules[_MODELS] = table
    try:
        from bfcl_eval.constants.enums import Language
        from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    finally:
        if known is None:
            del sys.modules[_MODELS]
        else:
            sys.modules[_MODELS] = known
    return ast_checker, Language


def _written(errors: Any) -> str:
    """The package's reasons in one line: it has lists of texts and of objects."""
    listed = errors if isinstance(errors, list) else [errors]
    return "; ".join(one if isinstance(one, str) else json.dumps(one, default=str) for one in listed)
