"""The limits of a container: Linux control groups, versions 2 and 1.

A process is in one group of each hierarchy (/proc/self/cgroup says which), and every group above limits it
too. A container may see less: no groups above, or only its own group, mounted at the root. The files are
described in the kernel's Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst and
Documentation/scheduler/sched-bwc.rst.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger("personae.kernels")
_ROOT = Path("/")


def memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes of memory that the process may use; None if no group limits it. `root`: of the file system."""
    return min((limit for limit, _ in _memory_limits(root)), default=None)


def main_memory() -> int | None:
    """Bytes of memory of the machine, or its container's limit if that is lower; None if the system does not
    say."""
    if sys.platform == "win32":
        return None
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return there if limit is None else min(there, limit)


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes that are free on the machine and within every limit, including memory that only caches files.
    None if the system does not say."""
    free = [limit - used for limit, used in _memory_limits(root)]
    with suppress(OSError, KeyError):
        free.append(_table(root / "proc/meminfo")["MemAvailable:"] * 1024)
    return max(min(free), 0) if free else None


def processors(root: Path = _ROOT) -> float | None:
    """How many processors' time the process may use; None if no group limits it."""
    return min(_processor_limits(root), default=None)


def usable_cores() -> float:
    """The number of cores that this process may use. Its affinity and the limits of its groups bound it."""
    there = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(there, processors() or there)


def keep_to_share(root: Path = _ROOT) -> None:
    """Limit torch's threads to the processors that the process may use, unless OMP_NUM_THREADS is set.

    With more threads the system stops all of them for the rest of each period, in the middle of a step.
    torch's default knows which processors the process may run on, but no quota.
    """
    import torch  # only in the process that computes

    share = processors(root)
    if "OMP_NUM_THREADS" not in os.environ and share is not None and share < torch.get_num_threads():
        torch.set_num_threads(max(int(share), 1))
        _log.info("this container may use %.4g processors: using %d threads", share, torch.get_num_threads())


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Each limit, and how much of it is used, without cached files."""
    for group in _groups(root, "memory"):
        for limit, used, prefix in (
            ("memory.max", "memory.current", ""),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
        ):
            with suppress(OSError, ValueError, KeyError):  # another version's file, or "max"
                stat = _table(group / "memory.stat")
                files = stat[f"{prefix}active_file"] + stat[f"{prefix}inactive_file"]
                yield int((group / limit).read_text()), int((group / used).read_text()) - files


def _processor_limits(root: Path) -> Iterator[float]:
    for group in _groups(root, "cpu"):
        with suppress(OSError, ValueError):  # "max"
            quota, period = map(int, (group / "cpu.max").read_text().split())
            yield quota / period
        with suppress(OSError):
            quota = int((group / "cpu.cfs_quota_us").read_text())
            if quota > 0:
                yield quota / int((group / "cpu.cfs_period_us").read_text())


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that limit what `controller` controls."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        top = mounted / controller if controllers else mounted
        names = path.strip("/").split("/")
        yield from (top.joinpath(*names[:depth]) for depth in range(len(names) + 1))


def _table(path: Path) -> dict[str, int]:
    """Reads a file whose lines are a name and a number. Raises OSError."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {name: int(value) for name, value, *_ in rows}
