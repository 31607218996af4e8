"""Personae: many fine-tuned personas of one base model, served from one engine.

The folders beside this file are links to the folders at the top of the repository; `docs/architecture.md`
walks a request through them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from personae.api.library import Engine, open

__version__ = "0.1.0"
__all__ = ["Engine", "__version__", "open"]


def __getattr__(name: str) -> Any:
    """`personae.open` and `personae.Engine`, imported when first used: they bring torch along."""
    if name in ("Engine", "open"):
        from personae.api import library

        return getattr(library, name)
    raise AttributeError(f"module 'personae' has no attribute {name!r}")
