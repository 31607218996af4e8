"""Settings for the whole test session."""

import torch
from hypothesis import HealthCheck, settings

# The same examples in every run, however long they take: what is green stays green until somebody changes
# something.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# The models here are tiny: a second thread costs more than it brings, far more when the cores are shared.
torch.set_num_threads(1)
