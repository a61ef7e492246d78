"""Everything that a plan says, as one object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from medusa_train.heads.config import HeadsConfig
from medusa_train.plan.amounts import Amount
from medusa_train.plan.benchmark import Speed
from medusa_train.plan.disk import Disk
from medusa_train.plan.memory import Memory, head_parameters
from medusa_train.plan.model_shape import ModelShape
from medusa_train.plan.work import Flops


@dataclass(frozen=True, slots=True)
class Device:
    """Where the run would be.

    Attributes:
        name: in words.
        count: devices that share the work.
        free_bytes: memory of one that is free now; None where the system does not say.
        process_bytes: what Python and the libraries hold on the host, measured in this process;
            on the CPU it comes on top of what the components add up to.
    """

    name: str
    count: int
    free_bytes: int | None
    process_bytes: int


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each stage, from a measurement on this device.

    Attributes:
        caching: of the stage hidden-states; 0 with ``online`` ones.
        step: of one optimizer step.
        num_steps: of the whole training.
        accuracy: of the accuracy report.
        layer_is_guessed: whether no layer of the base could be measured, so that its time is that
            of as many operations of the heads.
    """

    caching: float
    step: float
    num_steps: int
    accuracy: float
    layer_is_guessed: bool

    @property
    def training(self) -> float:
        """Of all steps."""
        return self.step * self.num_steps

    def as_dict(self) -> dict[str, Any]:
        """Seconds, by stage."""
        return {
            "hidden_states_seconds": self.caching,
            "seconds_per_step": self.step,
            "num_steps": self.num_steps,
            "train_seconds": self.training,
            "accuracy_seconds": self.accuracy,
            "layer_is_guessed": self.layer_is_guessed,
        }


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run needs.

    Attributes:
        recipe: its path.
        base_model: its name.
        base: its shape.
        heads: their shape.
        device: where.
        train: the text that is trained on.
        held_out: the text of the report.
        caching: memory of the stage hidden-states; None with ``online`` ones.
        training: memory of the stage train, by ZeRO stage.
        flops: operations.
        disk: room below the run directory.
        free_disk: room that is there.
        times: None where nothing was measured.
        warnings: what does not fit, and what to set.
        trained_base: parameters of the base, or of adapters on it, that are trained with the heads.
    """

    recipe: str
    base_model: str
    base: ModelShape
    heads: HeadsConfig
    device: Device
    train: Amount
    held_out: Amount
    caching: Memory | None
    training: Mapping[int, Memory]
    flops: Flops
    disk: Disk
    free_disk: int | None
    times: Times | None
    warnings: tuple[str, ...]
    trained_base: int = 0

    @property
    def trainable(self) -> int:
        """Parameters of all heads, and what is trained of the base."""
        return self.heads.num_heads * head_parameters(self.heads) + self.trained_base

    def as_dict(self) -> dict[str, Any]:
        """One JSON object; sizes in bytes, times in seconds."""
        amounts = {"train": self.train, "held_out": self.held_out}
        return {
            "recipe": self.recipe,
            "base_model": self.base_model,
            "device": asdict(self.device),
            "parameters": {
                "base": self.base.num_parameters,
                "per_head": head_parameters(self.heads),
                "heads": self.trainable - self.trained_base,
                "trainable": self.trainable,
            },
            "memory": {
                "hidden-states": None if self.caching is None else self.caching.as_dict(),
                "train": {f"zero{stage}": m.as_dict() for stage, m in self.training.items()},
            },
            "data": {name: _amount(amount) for name, amount in amounts.items()},
            "flops": asdict(self.flops),
            "disk": {**self.disk.as_dict(), "free": self.free_disk},
            "time": None if self.times is None else self.times.as_dict(),
            "warnings": list(self.warnings),
        }


def stage_times(
    speed: Speed,
    base: ModelShape,
    heads: HeadsConfig,
    *,
    train: Amount,
    held_out: Amount,
    flops: Flops,
    num_steps: int,
    num_epochs: float,
    accumulation: int,
    devices: int,
    is_online: bool,
    base_passes: int = 1,
) -> Times:
    """Seconds of each stage from what one head and one layer take.

    Args:
        speed: measured on this device.
        base: the base.
        heads: the heads.
        train: the text that is trained on.
        held_out: the text of the report.
        flops: operations of the stages.
        num_steps: optimizer steps of the training.
        num_epochs: passes over the data in them.
        accumulation: micro-batches of a step.
        devices: that share the batches; caching and the report run on one.
        is_online: whether the base runs at each step.
        base_passes: forward passes that this is worth, where it is trained.
    """
    rows = train.pairs / heads.num_heads * num_epochs / devices / num_steps
    step = speed.step(rows=rows, heads=heads.num_heads, micro_batches=accumulation)
    of_token = speed.layer_token
    if of_token is None:
        # As fast as the heads' products.
        per_flop = speed.row / (6 * heads.num_logits * heads.hidden_size)
        of_token = per_flop * 2 * base.active_parameters / base.num_layers
    of_base = of_token * base.num_layers
    if is_online:
        step += base_passes * of_base * train.tokens * num_epochs / devices / num_steps
    return Times(
        caching=0.0 if is_online or not flops.caching else of_base * train.tokens,
        step=step,
        num_steps=num_steps,
        accuracy=of_base * held_out.tokens + speed.rank_row * held_out.positions * heads.num_heads,
        layer_is_guessed=speed.layer_token is None,
    )


def _amount(amount: Amount) -> dict[str, Any]:
    names = ("conversations", "tokens", "positions", "pairs", "longest", "origin")
    return {name: getattr(amount, name) for name in names}
