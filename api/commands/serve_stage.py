"""`personae serve --node-rank N`: a stage of a model that the first machine serves."""

import signal
import sys
from contextlib import suppress

from personae.actors.cluster.stage_machines import serve_stage
from personae.actors.kit.gc_tuning import spare_what_is_here
from personae.api.options import ServeOptions
from personae.api.telemetry import logs


def run(options: ServeOptions) -> None:
    """Have the stage here until a signal to stop. Raises LoadError if the options do not fit, or the first
    machine refuses."""
    logs.configure(options.log_format, options.log_level)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the ranks end, too
    spare_what_is_here()
    with suppress(KeyboardInterrupt):
        serve_stage(options)
