"""What this machine has: devices, free memory, and what Python itself holds."""

from __future__ import annotations

import platform
import resource
import sys
from pathlib import Path

import torch

_MEMORY_FILE = Path("/proc/meminfo")


def num_devices(device: torch.device) -> int:
    """Devices of this kind on this machine; the CPU is one."""
    return 1 if device.type == "cpu" else max(1, torch.accelerator.device_count())


def device_name(device: torch.device) -> str:
    """The device in words that tell it from other models of its kind."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "xpu":
        return torch.xpu.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} {platform.machine()}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


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


class PeakMemory:
    """The growth of this process's resident memory since the object was made, at its highest.

    Linux alone tells it.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self.start = self._read("VmRSS")

    def growth(self) -> int:
        """Bytes."""
        return self._read("VmHWM") - self.start

    @staticmethod
    def _read(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
