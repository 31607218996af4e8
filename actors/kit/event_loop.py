"""Which event loop the processes run."""

from importlib.util import find_spec


def loop_options() -> dict[str, bool]:
    """AnyIO's options for asyncio: on uvloop where it is installed."""
    return {"use_uvloop": find_spec("uvloop") is not None}
