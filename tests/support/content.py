"""What a model is: what was made of it once in a process can be used for each that equals it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from transformers import PretrainedConfig

Base: TypeAlias = Path | PretrainedConfig
"""A model's folder, or the config of one that has the same random weights every time."""


@dataclass(frozen=True)
class Content:
    """A model, which equals another if the files of the folder are the same and unchanged, or the config."""

    base: Base = field(compare=False)
    text: str


def content_of(base: Base) -> Content:
    """What the model is now."""
    if not isinstance(base, Path):
        return Content(base, f"{type(base)} {base.to_json_string(use_diff=False)}")
    stats = [(file, file.stat()) for file in sorted(base.iterdir()) if file.is_file()]
    return Content(base, str([(str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats]))
