"""Imports xgrammar without torch and transformers.

xgrammar names both libraries in annotations and in helpers that are not used here. Their import takes seconds
and 200 MiB, in a process whose children share its memory page by page. Only a process that never needs the
real libraries may do this.
"""

import sys
from contextlib import suppress
from types import ModuleType
from typing import Any


class _Meta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


class _Anything(metaclass=_Meta):
    """What a module of a library that is left out contains: a class that can be named and called."""

    def __init__(self, *arguments: object, **named: object) -> None: ...


class _LeftOut(ModuleType):
    """A library that is left out."""

    __path__: list[str] = []  # noqa: RUF012 - a package without files; modules have this as a plain list

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


def import_xgrammar() -> None:
    """Import xgrammar. If it needs more of the libraries than their names, it is imported with them."""
    left_out = [name for name in ("torch", "transformers") if name not in sys.modules]
    try:
        # this one asks whether torch can be imported, and does without
        sys.modules.update(dict.fromkeys(left_out))  # type: ignore[arg-type]  # None forbids the import
        with suppress(ImportError):
            import tvm_ffi  # noqa: F401
        sys.modules.update({name: _LeftOut(name) for name in left_out})
        try:
            import xgrammar  # noqa: F401
        except Exception:  # whatever it does with a name that is not there
            for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
                del sys.modules[name]
    finally:
        for name in left_out:
            del sys.modules[name]
