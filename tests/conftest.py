"""Settings for the whole test session."""

import gc
from collections import Counter
from itertools import chain, zip_longest
from pathlib import Path

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

# Files whose tests mostly wait: for processes, browsers and restarts. They begin early and run beside files
# that compute. At the end of the run, nothing else would use the cores.
WAITING = (
    "api/test_killed_frontend.py",
    "actors/test_in_process_on_a_gpu.py",
    "api/test_two_processes.py",
    "evals/test_kills.py",
    "api/test_other_posix.py",
    "api/test_rolling_restart.py",
    "evals/test_durability.py",
    "api/base_models/test_served.py",
    "api/console/test_browser.py",
    "api/console/test_chat.py",
    "api/console/test_restart.py",
    "api/console/test_accessibility.py",
    "api/console/test_tenants.py",
    "api/console/test_adapters.py",
    "api/console/test_evals.py",
    "evals/test_speculation.py",
)
# Files that take a worker a minute and more, the longest first. They begin first for the same reason.
SLOW = (
    "engine/test_dry_run.py",
    "evals/bench/test_gpu_dry_run.py",
    "kernels/test_triton_compiles.py",
    "kernels/test_triton.py",
    "evals/test_isolation.py",
    "evals/test_eval_cli.py",
    "kernels/ptx/test_kernels.py",
    "kernels/test_cpu.py",
    "simulation/test_replicas.py",
    "simulation/test_flood_over_replicas.py",
    "kernels/test_sets.py",
    "kernels/test_blocks.py",
    "grammar/sandbox/test_forkserver.py",
    "kernels/ptx/test_mutations.py",
    "api/http/test_openapi.py",
    "engine/speculation/test_heads.py",
    "evals/test_adversarial.py",
    "engine/test_models.py",
    "simulation/test_simulation.py",
    "api/test_hostile_schemas.py",
    "grammar/checked/test_structures.py",
    "engine/checkpoints/test_smollm2.py",
    "kernels/test_fused.py",
    "engine/test_families.py",
    "test_docs.py",
    "grammar/tracked/test_distinct.py",
    "test_wheel.py",
    "engine/test_dry_run_notices.py",
    "engine/test_jump_forward.py",
    "engine/test_step_deferred.py",
    "api/test_speculation.py",
    "actors/enginecore/test_tier.py",
)
TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests: a slow file and a waiting file alternate; the others follow, the largest first."""
    tests = Counter(item.path for item in items)
    in_turn = chain.from_iterable(zip_longest(SLOW, WAITING))
    turn = {TESTS / name: place for place, name in enumerate(filter(None, in_turn))}
    items.sort(key=lambda item: (turn.get(item.path, len(turn)), -tests[item.path]))


gc.disable()  # until the first test: what is imported is no garbage


@pytest.fixture(autouse=True, scope="module")
def _spare_what_is_here() -> None:
    """Have the garbage collector pass over the modules, tests and caches that there are before a file's
    tests: more than a million objects, for which every full collection took half a second."""
    spare_what_is_here()
