"""Several processes as one run: who is the main one, and how the others wait for it.

A launcher (this command itself, torchrun, accelerate or deepspeed) tells each process its rank in
the environment. What is said here goes over the CPU (gloo) and waits as long as it takes, since the
main process may write for hours what the others need.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from medusa_train.console import is_main_process
from medusa_train.errors import INTERRUPTED, MedusaTrainError

Result = TypeVar("Result")

PATIENCE = timedelta(days=30)
"""How long a process waits for another one that is at work."""

_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


class FailedElsewhereError(MedusaTrainError):
    """The main process has failed, and has said so; the others end with its exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the main process failed")
        self.exit_code = exit_code

    @property
    def lines(self) -> tuple[str, ...]:
        """None: the main process has printed them."""
        return ()


def num_processes() -> int:
    """Processes of this run on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_launched() -> bool:
    """Whether a launcher started this process and told it its rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


@contextmanager
def process_group(*, use_cpu: bool = False) -> Iterator[None]:
    """Join the other processes for the time of the block; alone, nothing happens.

    Args:
        use_cpu: the accelerators of this machine are left alone.
    """
    if not is_launched() or dist.is_initialized():
        yield
        return
    accelerator = None if use_cpu else torch.accelerator.current_accelerator()
    backend = "gloo"
    if accelerator is not None and torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        backend = f"cpu:gloo,{accelerator.type}:{_BACKENDS.get(accelerator.type, 'gloo')}"
    dist.init_process_group(backend)
    _Control.group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        with warnings.catch_warnings():
            # What torch tells other libraries about their own calls.
            for message in (
                "`broadcast_buffers` is deprecated",
                r".*torch\.distributed\..*deprecated",
            ):
                warnings.filterwarnings("ignore", message=message, category=FutureWarning)
            yield
    finally:
        _Control.group = None
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Return when every process has come here."""
    if _Control.group is not None:
        dist.barrier(group=_Control.group)


def any_process(flag: bool) -> bool:
    """Whether ``flag`` is true in any process; all of them ask at the same point."""
    if _Control.group is None:
        return flag
    value = torch.tensor(int(flag))
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=_Control.group)
    return bool(value)


def on_main(action: Callable[[], Result]) -> Result:
    """Let the main process do something while the others wait; all of them get what it returns.

    Raises:
        FailedElsewhereError: in the other processes, when it failed in the main one.
    """
    if _Control.group is None:
        return action()
    message: list[tuple[bool, object]] = [(False, 1)]
    if not is_main_process():
        dist.broadcast_object_list(message, src=0, group=_Control.group)
        is_done, value = message[0]
        if not is_done:
            assert isinstance(value, int)
            raise FailedElsewhereError(value)
        return value  # type: ignore[return-value]
    try:
        result = action()
        message = [(True, result)]
    except MedusaTrainError as error:
        message = [(False, error.exit_code)]
        raise
    except KeyboardInterrupt:
        message = [(False, INTERRUPTED)]
        raise
    finally:
        dist.broadcast_object_list(message, src=0, group=_Control.group)
    return result


class _Control:
    """The group of all processes over which this module talks; None for one process alone."""

    group: dist.ProcessGroup | None = None
