"""The process that talks to Ray, for `evals/chaos.py --ray`. Its engines have a planted fault.

python -m personae.evals.ray_driver FD
"""

import sys

from personae.actors.cluster import ray_driver
from personae.actors.cluster.ray_host import EngineHost


class WeakHost(EngineHost):
    """Starts engines that a request can kill."""

    command = (sys.executable, "-m", "personae.evals.crashing_core")


if __name__ == "__main__":
    from personae.evals.ray_driver import WeakHost as Weak  # a name that nodes can import

    ray_driver.Driver.host = Weak
    ray_driver.main()
