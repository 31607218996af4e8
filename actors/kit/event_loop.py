"""Which event loop the processes use."""

from importlib.util import find_spec


def loop_options() -> dict[str, bool]:
    """AnyIO's options for asyncio: uvloop, if it is installed."""
    return {"use_uvloop": find_spec("uvloop") is not None}
