"""Settings for the whole test session."""

import gc

import pytest
import torch
from hypothesis import HealthCheck, settings

from personae.actors.kit.gc_tuning import spare_what_is_here

# The same examples in every run, however long they take: what is green stays green until somebody changes
# something.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# The models here are tiny: a second thread costs more than it brings, far more when the cores are shared.
torch.set_num_threads(1)

gc.disable()  # until the first test: what is imported is no garbage


@pytest.fixture(autouse=True, scope="module")
def _spare_what_is_here() -> None:
    """Have the garbage collector pass over the modules, tests and caches that there are before a file's
    tests: more than a million objects, for which every full collection took half a second."""
    spare_what_is_here()
