"""Start a command of ours in a process, kill it at a moment, run it to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def start(module: str, arguments: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
    """Run ``medusa_train.cli.MODULE`` with ``arguments``; stderr is appended to ``log``."""
    script = f"from medusa_train.cli.{module} import main; main()"
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )


def finish(module: str, arguments: Sequence[str], *, log: Path) -> None:
    """Run the command to its end, and see that it succeeds."""
    assert start(module, arguments, log=log).wait(timeout=300) == 0, log.read_text()


def kill_when(
    condition: Callable[[], bool], module: str, arguments: Sequence[str], *, log: Path
) -> bool:
    """Start the command, kill it as soon as the condition holds; whether it was still running."""
    process = start(module, arguments, log=log)
    try:
        while not condition():
            if process.poll() is not None:
                return False
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
