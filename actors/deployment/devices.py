"""Devices as their makers describe them. docs/operate/planning.md has the sources."""

import re
from dataclasses import dataclass

from personae.errors import LoadError

MOST = 1024  # devices
_GIVEN = re.compile(r"(?:(\d{1,4})x)?(\w+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Device:
    """memory: bytes. bandwidth: bytes per second of its memory. flops: operations per second on dense
    matrices in bfloat16, of which a multiplication with an addition is two. link: bytes per second to another
    device of the machine, in one direction. latency: seconds of one exchange between devices. launch: seconds
    of a step that do not depend on its size. gpu: whether it is one."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    latency: float
    launch: float
    gpu: bool = True


DEVICES = {
    device.name.lower(): device
    for device in (
        Device("H100", 80e9, 3.35e12, 989e12, 450e9, 10e-6, 1e-3),
        Device("H200", 141e9, 4.8e12, 989e12, 450e9, 10e-6, 1e-3),
        Device("A100", 80e9, 2.04e12, 312e12, 300e9, 10e-6, 1e-3),
        Device("L4", 24e9, 300e9, 121e12, 32e9, 30e-6, 1e-3),
        Device("4090", 24e9, 1.01e12, 165e12, 32e9, 30e-6, 1e-3),
        Device("CPU", 256e9, 307e9, 14e12, 40e9, 50e-6, 2e-3, gpu=False),
    )
}


def parse_devices(text: str) -> tuple[int, Device]:
    """The number of devices and their kind, from a text such as 8xH100 or L4. Raises LoadError."""
    found = _GIVEN.fullmatch(text.strip())
    device = None if found is None else DEVICES.get(found[2].lower())
    if found is None or device is None:
        known = ", ".join(each.name for each in DEVICES.values())
        raise LoadError(f"--devices {text}: write a number and a kind, as in 8xH100. The kinds are {known}.")
    count = int(found[1] or 1)
    if not 1 <= count <= MOST:
        raise LoadError(f"--devices {text}: the number must be 1 to {MOST}.")
    return count, device
