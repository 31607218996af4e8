"""Python's cycle collector, which has the interpreter's lock for as long as it looks.

A full collection looks at every object that may be part of a cycle. After a model and the libraries around it
are loaded these are some 200,000, which takes 50 to 120 ms in which no thread of the process runs Python: no
stream goes on, no step is launched. It comes whenever enough has been allocated, on whatever thread that is,
such as one that reads the header of an upload.
"""

import gc


def spare_what_is_here() -> None:
    """Nothing that exists now is looked at again: it lives as long as the process. Garbage goes first.

    For a process's main function, when it has loaded.
    """
    gc.collect()
    gc.freeze()
