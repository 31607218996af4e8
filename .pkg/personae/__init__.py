"""Personae: many fine-tuned personas of one base model, served from one engine.

The folders beside this file are links to the folders at the top of the repository; `docs/architecture.md`
walks a request through them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from personae.api.library import Engine, open
    from personae.api.options import ServeOptions

__version__ = "0.1.0"
__all__ = ["Engine", "ServeOptions", "__version__", "open"]


def __getattr__(name: str) -> Any:
    """What a program uses, imported when first used: `open` and `Engine` load torch."""
    if name in ("Engine", "open"):
        from personae.api import library

        return getattr(library, name)
    if name == "ServeOptions":
        from personae.api.options import ServeOptions

        return ServeOptions
    raise AttributeError(f"module 'personae' has no attribute {name!r}")
