"""What this machine has: devices, free memory, and what Python itself holds."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_MEMORY_FILE = Path("/proc/meminfo")


def num_devices(device: torch.device) -> int:
    """Devices of this kind on this machine; the CPU is one."""
    return 1 if device.type == "cpu" else max(1, torch.accelerator.device_count())


def device_name(device: torch.device) -> str:
    """The device in words."""
    return f"CPU ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device, or None where the system does not say."""
    if device.type != "cpu":
        try:
            return torch.accelerator.get_memory_info(device)[0]
        except RuntimeError:
            # Some backends have no such figure.
            return None
    try:
        lines = _MEMORY_FILE.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] * 1024 if found else None


def process_bytes() -> int:
    """The most that this process has held so far: Python and its libraries, before any work."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
