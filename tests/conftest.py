"""Settings for the whole test session."""

from functools import partial

import torch
from hypothesis import HealthCheck, settings

from personae.grammar.sandbox import forkserver
from personae.grammar.sandbox.server import SandboxLimits

# The same examples in every run, however long they take: what is green stays green until somebody changes
# something.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# The models here are tiny: a second thread costs more than it brings, far more when the cores are shared.
torch.set_num_threads(1)

# A long compile runs on idle cores only. On a busy machine it may wait longer than a client would.
setattr(forkserver, "SandboxLimits", partial(SandboxLimits, patience=600.0))  # noqa: B010  # mypy: a type is no variable
