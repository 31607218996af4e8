"""Settings for the whole test session."""

import gc
from collections import Counter

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

# Files of a few tests that take half a minute and more. They begin first, so that no core is idle at the end.
SLOW = frozenset(
    (
        "test_adversarial.py",
        "test_checked.py",
        "test_forkserver.py",
        "test_gpu_dry_run.py",
        "test_hostile_schemas.py",
        "test_isolation.py",
        "test_mutations.py",
        "test_neon.py",
        "test_smollm2.py",
        "test_speculation.py",
        "test_triton.py",
        "test_triton_compiles.py",
        "test_wheel.py",
    )
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, then those with the most tests."""
    tests = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in SLOW, -tests[item.path]))


gc.disable()  # until the first test: what is imported is no garbage


@pytest.fixture(autouse=True, scope="module")
def _spare_what_is_here() -> None:
    """Have the garbage collector pass over the modules, tests and caches that there are before a file's
    tests: more than a million objects, for which every full collection took half a second."""
    spare_what_is_here()
