"""Writes engine/models/config_keys.json: which keys of a config.json mean something to transformers.

    python tests/support/config_keys.py

`families` has the keys of each family's config class with their defaults, `others` the names that another
model's class declares or that transformers' code reads from a config.
"""

import json
import re
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING

from personae.engine.models import FAMILIES, MODEL_TYPES

FILE = Path(__file__).parents[2] / "engine" / "models" / "config_keys.json"
OWN_CODE = {"MiMoForCausalLM": "qwen2"}
"""Families whose class is in their repository, and the class that it inherits from."""
_DECLARED = re.compile(r"^    ([a-z_][a-z0-9_]*)\s*:\s", re.MULTILINE)
_READ = re.compile(r'getattr\((?:self\.)?(?:text_)?config, "([a-z_0-9]+)"')


def defaults(architecture: str) -> dict[str, Any]:
    """The keys of a family's config class, with their defaults as JSON."""
    types = {architecture: kind for kind, architecture in MODEL_TYPES.items()}
    config = CONFIG_MAPPING[OWN_CODE.get(architecture, types[architecture])]()
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    text = values.get("text_config", {})
    return {name: value for name, value in {**values, **text}.items() if not isinstance(value, dict)}


def others() -> list[str]:
    """All names that some config class declares, or that code reads although no class does."""
    root = Path(transformers.__file__).parent
    found: set[str] = set()
    for path in root.glob("models/*/configuration_*.py"):
        found |= {*_DECLARED.findall(path.read_text())}
    for pattern in ("models/*/modeling_*.py", "*.py", "integrations/*.py"):
        for path in root.glob(pattern):
            found |= {*_READ.findall(path.read_text())}
    return sorted(found)


def table() -> dict[str, Any]:
    """The whole table."""
    families = {architecture: defaults(architecture) for architecture in FAMILIES}
    return {"families": families, "others": others()}


if __name__ == "__main__":
    FILE.write_text(json.dumps(table(), separators=(",", ":"), sort_keys=True) + "\n")
