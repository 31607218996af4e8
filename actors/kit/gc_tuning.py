"""Python's cycle collector, which holds the interpreter lock while it runs.

A full collection visits every object that may be part of a cycle. After a model and the libraries around it
are loaded, these are some 200,000. That takes 50 to 120 ms, in which no thread of the process runs Python: no
stream advances and no step is launched. It runs whenever enough was allocated, on whatever thread that is,
such as one that reads the header of an upload.
"""

import gc


def spare_what_is_here() -> None:
    """Exclude all objects that exist now from later collections, after collecting garbage: they live as long
    as the process. A collector that was off while they were loaded is on from now on.

    Call it in a process's main function, after loading.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
