"""What a container may have is read from control groups of both versions, in trees as systems have them."""

from pathlib import Path

import pytest
import torch

from personae.kernels.cgroup import free_memory, keep_to_share, memory_limit, processors

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
    return root


def version_2(
    group: str, limit: str, used: int = 0, files: int = 0, cpu: str = "max 100000"
) -> dict[str, str]:
    return {
        f"{group}/memory.max": limit,
        f"{group}/memory.current": str(used),
        f"{group}/memory.stat": f"anon 7\nactive_file {files // 2}\ninactive_file {files - files // 2}",
        f"{group}/cpu.max": cpu,
    }


def version_1(group: str, limit: int, used: int = 0, files: int = 0) -> dict[str, str]:
    return {
        f"{group}/memory.limit_in_bytes": str(limit),
        f"{group}/memory.usage_in_bytes": str(used),
        f"{group}/memory.stat": f"active_file 3\ntotal_active_file {files}\ntotal_inactive_file 0",
    }


def available(size: int) -> dict[str, str]:
    return {
        "proc/meminfo": f"MemTotal:       65536 kB\nMemAvailable: {size // 1024} kB\nHugePages_Total:   0"
    }


def test_the_narrowest_group_above_limits(tmp_path: Path) -> None:
    top = "sys/fs/cgroup"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod7/main",
            **version_2(f"{top}/kubepods", "max", 50 * GIB),
            **version_2(f"{top}/kubepods/pod7", str(4 * GIB), 3 * GIB, 2 * GIB, "150000 100000"),
            **version_2(f"{top}/kubepods/pod7/main", str(8 * GIB), 1 * GIB, cpu="400000 100000"),
            **available(30 * GIB),
        },
    )
    assert memory_limit(root) == 4 * GIB
    assert free_memory(root) == 3 * GIB, "copies of files give way"
    assert processors(root) == 1.5


def test_a_container_whose_own_group_is_what_is_mounted_is_limited_by_it(tmp_path: Path) -> None:
    v2 = write(
        tmp_path / "v2",
        {"proc/self/cgroup": "0::/", **version_2("sys/fs/cgroup", str(GIB), cpu="50000 100000")},
    )
    assert (memory_limit(v2), free_memory(v2), processors(v2)) == (GIB, GIB, 0.5)
    v1 = write(
        tmp_path / "v1",
        {
            "proc/self/cgroup": "5:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n0::/",
            **version_1("sys/fs/cgroup/memory", 3 * GIB, 2 * GIB, GIB),
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            **available(GIB),
        },
    )
    assert (memory_limit(v1), free_memory(v1), processors(v1)) == (3 * GIB, GIB, 2.5)


def test_a_machine_without_limits_has_none(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "2:cpu:/user\n1:name=systemd:/user\n0::/user",
            "sys/fs/cgroup/cpu/user/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/user/cpu.cfs_period_us": "100000",
            **available(6 * GIB),
        },
    )
    assert (memory_limit(root), free_memory(root), processors(root)) == (None, 6 * GIB, None)
    assert (memory_limit(tmp_path / "mac"), free_memory(tmp_path / "mac")) == (None, None)


@pytest.mark.parametrize(
    ("quota", "asked", "threads"),
    [
        ("150000 100000", None, 1),
        ("10000 100000", None, 1),
        ("200000 100000", None, 2),
        ("900000 100000", None, 3),
        ("max 100000", None, 3),
        ("100000 100000", "3", 3),
    ],
)
def test_torch_has_no_more_threads_than_the_container_has_time_for(
    quota: str, asked: str | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        keep_to_share(root)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
