"""This very command, started again as one process per device, by torchrun's own agent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence

import psutil
import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from medusa_train.distributed import is_launched
from medusa_train.errors import INTERRUPTED, InputError, MedusaTrainError
from medusa_train.recipe.schema import Recipe

SHUTDOWN_SECONDS = 120
"""How long processes that end may save, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise."""


MAX_CPU_PROCESSES = 64
"""Processes of one machine without accelerators; with more cores, as many as it has."""


def processes_to_start(recipe: Recipe, *, devices: int | None) -> int:
    """How many processes this command must start; 0 if it is one of them, or does the work itself.

    Args:
        recipe: what it runs.
        devices: as the user gave it; None is every accelerator here, or the CPU as one device.

    Raises:
        InputError: more devices than there are.
    """
    if is_launched():
        return 0
    use_cpu = bool(recipe.train.trainer.get("use_cpu", False))
    here = 0 if use_cpu else torch.accelerator.device_count()
    count = max(1, here) if devices is None else devices
    most = here or max(MAX_CPU_PROCESSES, os.cpu_count() or 1)
    if count > most:
        what = f"the accelerators here, which are {here}" if here else f"{most} on a CPU"
        raise InputError(f"--devices: must be at most {what}; got {count}")
    # DeepSpeed needs a process group, also for one process; and a single process that sees several
    # accelerators would take them all.
    return count if count > 1 or here > 1 or recipe.deepspeed is not None else 0


def run_again(arguments: Sequence[str], *, num_processes: int) -> int:
    """Run ``medusa-train`` with ``arguments`` in processes that know of each other.

    Args:
        arguments: of the command line, without its name.
        num_processes: to start on this machine.

    Returns:
        The exit code: that of the first process that failed, 130 after a signal.

    Raises:
        MedusaTrainError: a process was killed.
    """
    # What a process has to say it says itself; the agent's own report names no cause.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    num_threads = max(1, torch.get_num_threads() // num_processes)
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    given = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    try:
        with tempfile.TemporaryDirectory() as logs:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_processes,
                run_id="medusa-train",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
                shutdown_timeout=None if given else SHUTDOWN_SECONDS,
            )
            elastic_launch(config, sys.executable)("-m", "medusa_train.cli.train", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        name = signal.Signals(-failure.exitcode).name
        raise MedusaTrainError(
            f"process {rank} of {num_processes} was ended by {name}; if the kernel did it, memory "
            "ran out (see medusa-train plan); run the same command again, it goes on"
        ) from error
    except SignalException:
        _end_children()
        return INTERRUPTED
    return 0


def _end_children() -> None:
    """A second signal cuts the agent's wait short; then nothing may be left behind."""
    for child in psutil.Process().children(recursive=True):
        child.kill()
