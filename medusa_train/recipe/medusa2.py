"""What ``train.medusa2`` may say, and the mistakes in it that tie keys together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from medusa_train.recipe.section import (
    Count,
    CountOrOff,
    Positive,
    Probability,
    Section,
    Text,
)
from medusa_train.recipe.trainer_block import check_trainer
from medusa_train.recipe.yaml_reader import Key

Wrong = tuple[Key, str]
_WHERE: Key = ("train", "medusa2")


class LoraSection(Section):
    """The adapters, with `trained: lora`."""

    rank: Count = 32
    """Rank r of the adapters."""
    alpha: Positive = 16.0
    """The adapters' product counts `alpha` ÷ `rank`."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of an adapter's input that is left out in training."""
    target_modules: list[Text] | None = None
    """Last parts of the names of the layers that are adapted, such as `[q_proj, v_proj]`; null is
    all linear layers."""
    lm_head: bool | None = None
    """Whether `lm_head` is adapted; null is: where it is not the input embedding too. True is
    refused where it is, but for `untie_lm_head`."""
    untie_lm_head: bool = False
    """Give an `lm_head` that is the input embedding too a weight of its own; the merged model is
    larger by that."""


class WarmUpSection(Section):
    """Heads alone, before base and heads together."""

    trainer: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `transformers.TrainingArguments` for the warm-up, over those of
    `train.trainer`: its own epochs, learning rate, schedule and so on."""


class GuardSection(Section):
    """What keeps the base from moving too far; evaluated with `train.trainer.eval_strategy`."""

    max_kl: Positive
    """Limit of the held-out KL(original ‖ trained base), in nats per token."""
    lower_by: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.5
    """The heads' weight is multiplied by this at each evaluation above the limit, and where
    training goes on after a rollback."""
    patience: Count = 3
    """After so many evaluations in a row above the limit training goes back, or stops with the
    last checkpoint below it as the result."""
    num_rollbacks: CountOrOff = 0
    """How often training goes back to the last checkpoint below the limit, and on from there with
    less weight of the heads and lower learning rates, before it stops."""
    lower_learning_rate_by: Probability = 0.5
    """The learning rates of base and heads are multiplied by this at each rollback; 1 leaves them.
    For `num_rollbacks`."""


class Medusa2Section(Section):
    """How base and heads are trained together, with `method: medusa2`."""

    trained: Literal["lora", "full", "last_layers"] = "lora"
    """`lora`: adapters on the base. `full`: all its weights. `last_layers`: those of its last
    layers, and of the norm behind them."""
    lora: LoraSection | None = None
    """The adapters; null is the section's defaults."""
    num_last_layers: Count | None = None
    """How many layers `trained: last_layers` trains."""
    base_loss: Literal["kl", "cross_entropy"] = "kl"
    """Loss of the base: KL(original ‖ trained) at every supervised token, for text that the base
    wrote itself, or the cross-entropy of the next token."""
    teacher: Literal["adapters_off", "frozen_copy", "stored"] | None = None
    """Where the original's distribution comes from: the base with its adapters switched off, a
    second copy of it, or log-probabilities that were stored with the data. Null is `adapters_off`
    with `trained: lora`."""
    head_loss_weight: Positive = 0.2
    """λ0, the weight of all heads' loss against the base's."""
    head_loss_schedule: Literal["constant", "linear", "sine"] = "sine"
    """How λ0 rises from 0 to its value: at once, along a line, or along a quarter of a sine."""
    head_loss_share: Probability = 1.0
    """Share of the steps over which λ0 rises."""
    head_loss_delay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Steps before λ0 begins to rise; below 1, a share of all steps."""
    head_lr_multiplier: Positive = 4.0
    """The heads' learning rate is that of `train.trainer` times this."""
    head_gradient_scale: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """The heads' gradient counts this much where it enters the base."""
    head_detach_probability: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Probability with which a batch's heads send no gradient into the base."""
    warm_up: WarmUpSection | None = None
    """Train the heads alone first, as `method: medusa1` does; null begins with both."""
    guard: GuardSection | None = None
    """Keep the base near the original; null does not look."""


def medusa2_mistakes(value: Mapping[str, Any]) -> Iterator[Wrong]:
    """Yield what is wrong between the keys of ``train.medusa2`` and others."""
    train = _section(value, "train")
    trainer = _section(train, "trainer")
    if train.get("method", "medusa1") != "medusa2":
        if train.get("medusa2") is not None:
            yield _WHERE, "is for method: medusa2; set that, or remove the section"
        for name in ("gradient_checkpointing", "activation_checkpointing"):
            if trainer.get(name) is True:
                message = "is for method: medusa2; a frozen base keeps no activations"
                yield ("train", "trainer", name), message
        return
    own = _section(train, "medusa2")
    yield from _base_mistakes(value, own)
    yield from _teacher_mistakes(value, own)
    yield from _training_mistakes(value, own)


def _training_mistakes(value: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Wrong]:
    """What goes on in training besides."""
    train = _section(value, "train")
    trainer = _section(train, "trainer")
    if train.get("hidden_states", "cached") == "cached" and own.get("warm_up") is None:
        message = "must be online for method: medusa2, whose base changes; cached is for a warm_up"
        yield ("train", "hidden_states"), message
    if trainer.get("fsdp"):
        yield ("train", "trainer", "fsdp"), "is for method: medusa1; set deepspeed instead"
    for name, message in check_trainer(_section(_section(own, "warm_up"), "trainer")):
        yield (*_WHERE, "warm_up", "trainer", name), message
    if isinstance(own.get("guard"), dict):
        yield from _guard_mistakes(value, own["guard"])


def _guard_mistakes(value: Mapping[str, Any], guard: Mapping[str, Any]) -> Iterator[Wrong]:
    """Whether there is something to judge by, and to go back to."""
    where = (*_WHERE, "guard")
    trainer = _section(_section(value, "train"), "trainer")
    if str(trainer.get("eval_strategy", "no")) == "no":
        yield where, "needs train.trainer.eval_strategy: steps, or epoch"
    if str(trainer.get("save_strategy", "steps")) not in {"steps", "epoch"}:
        yield where, "needs checkpoints; set train.trainer.save_strategy: steps, or epoch"
    if _section(value, "data").get("eval_fraction") == 0:
        yield where, "needs held-out conversations; raise data.eval_fraction"
    default = GuardSection.model_fields["lower_learning_rate_by"].default
    is_set = guard.get("lower_learning_rate_by", default) != default
    if is_set and not guard.get("num_rollbacks"):
        message = "is for num_rollbacks; set that to 1 or more, or remove this"
        yield (*where, "lower_learning_rate_by"), message


def _base_mistakes(value: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Wrong]:
    """What is trained, and whether this base can be."""
    base, lora = _section(value, "base_model"), _section(own, "lora")
    trained = own.get("trained", "lora")
    if base.get("gguf_file") is not None:
        message = "cannot be trained by method: medusa2; save the model as safetensors and name it"
        yield ("base_model", "gguf_file"), message
    if trained != "lora" and base.get("quantization") is not None:
        message = "keeps weights that cannot be trained; set train.medusa2.trained: lora, or null"
        yield ("base_model", "quantization"), message
    if trained != "lora" and lora:
        yield (*_WHERE, "lora"), "is for trained: lora; remove it"
    has_number = own.get("num_last_layers") is not None
    if trained == "last_layers" and not has_number:
        yield (*_WHERE, "num_last_layers"), "missing; it says how many layers are trained"
    if trained in {"lora", "full"} and has_number:
        yield (*_WHERE, "num_last_layers"), "is for trained: last_layers; remove it"
    if lora.get("untie_lm_head") is True and lora.get("lm_head") is not True:
        yield (*_WHERE, "lora", "untie_lm_head"), "is for lm_head: true"


def _teacher_mistakes(value: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Wrong]:
    """Whether there is an original to compare the trained base with."""
    train = _section(value, "train")
    where = (*_WHERE, "teacher")
    teacher, trained = own.get("teacher"), own.get("trained", "lora")
    soft = train.get("soft_target_weight")
    is_needed = own.get("base_loss", "kl") == "kl" or own.get("guard") is not None or bool(soft)
    if trained != "lora" and is_needed and teacher in {None, "adapters_off"}:
        yield (
            where,
            "would compare the model with itself: where its own weights are trained there are no "
            "adapters to switch off; set frozen_copy, or stored",
        )
    elif trained != "lora" and teacher == "adapters_off":
        yield where, "is for trained: lora; remove it"
    if teacher != "stored":
        return
    if soft:
        message = "stored log-probabilities are for the base's loss alone; set it to 0"
        yield ("train", "soft_target_weight"), message
    distill = _section(_section(value, "data"), "distill")
    kinds = ("teacher_top_n", "teacher_samples")
    if distill and all(distill.get(kind) is None for kind in kinds):
        message = (
            "stored needs log-probabilities: set data.distill.teacher_top_n or teacher_samples"
        )
        yield where, message


def _section(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = value.get(name)
    return section if isinstance(section, dict) else {}
