"""What a recipe needs, before a weight is loaded: what ``medusa-train plan`` does."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, TrainingArguments

from medusa_train.console import log, warn
from medusa_train.data.conversations import CONVERSATIONS_FILE, is_dataset
from medusa_train.errors import InputError
from medusa_train.heads.config import HeadsConfig
from medusa_train.hidden_states.cache import MAX_BATCH_TOKENS
from medusa_train.hidden_states.shards import SHARD_POSITIONS
from medusa_train.plan import work
from medusa_train.plan.advice import disk_warning, memory_warning
from medusa_train.plan.amounts import (
    Amount,
    batch_positions,
    dataset_amounts,
    greatest_amounts,
)
from medusa_train.plan.benchmark import benchmark_bytes, measure_speed
from medusa_train.plan.device import device_name, free_memory, num_devices, process_bytes
from medusa_train.plan.disk import Disk, disk_needed
from medusa_train.plan.estimate import Device, Estimate, Times, stage_times
from medusa_train.plan.joint import JointLoad, with_joint
from medusa_train.plan.memory import (
    ZERO_STAGES,
    Load,
    Memory,
    caching_memory,
    training_memory,
)
from medusa_train.plan.model_shape import (
    QUANTISED_BYTES,
    ModelShape,
    load_config,
    meta_model,
    shape_of,
)
from medusa_train.recipe.load import LoadedRecipe
from medusa_train.recipe.schema import Recipe, TrackingSection
from medusa_train.run_dir import RunDir
from medusa_train.stages import Workspace
from medusa_train.train.build import compute_dtype, training_arguments
from medusa_train.train.build_joint import make_trainable, needs_original, trained_in_float32


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A recipe with all that the estimates read of it."""

    loaded: LoadedRecipe
    config: PretrainedConfig
    dtype: torch.dtype
    base: ModelShape
    heads: HeadsConfig
    args: TrainingArguments
    train: Amount
    held_out: Amount
    load: Load
    device: Device
    joint: JointLoad | None = None

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def num_epochs(self) -> float:
        """Passes over the training data."""
        per_epoch = self.steps_per_epoch
        steps = self.args.max_steps
        return steps / per_epoch if steps > 0 else float(self.args.num_train_epochs)

    @property
    def steps_per_epoch(self) -> int:
        return work.steps_per_epoch(
            self.train.conversations,
            batch_size=self.load.batch_size,
            accumulation=self.load.accumulation,
            devices=self.device.count,
        )

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the training."""
        return max(1, round(self.num_epochs * self.steps_per_epoch))


def plan_recipe(
    loaded: LoadedRecipe, *, devices: int | None = None, with_benchmark: bool = True
) -> Estimate:
    """Estimate what a run of the recipe needs; nothing is written and no weight is read.

    Args:
        loaded: the recipe; files that it names need not be there.
        devices: that share the training; None for those of this machine.
        with_benchmark: whether to measure this device for a few seconds.

    Raises:
        InputError: the base's config is not there or not that of a causal language model, or the
            Trainer refuses an argument.
    """
    inputs = _inputs(loaded, devices=devices)
    base, heads, load = inputs.base, inputs.heads, inputs.load
    amounts = {"train": inputs.train, "held_out": inputs.held_out}
    training = {zero: _training(inputs, zero) for zero in ZERO_STAGES}
    caching = _caching(inputs) if _caches(inputs) else None
    flops = work.count_flops(
        base,
        heads,
        **amounts,
        is_online=load.is_online,
        soft_targets=load.soft_targets,
        base_passes=1 if inputs.joint is None else inputs.joint.base_passes,
    )
    disk = _disk(inputs)
    free_disk = shutil.disk_usage(_existing(loaded.run_dir)).free
    return Estimate(
        recipe=str(loaded.path),
        base_model=loaded.recipe.base_model.name_or_path,
        base=base,
        heads=heads,
        device=inputs.device,
        **amounts,
        caching=caching,
        training=training,
        flops=flops,
        disk=disk,
        free_disk=free_disk,
        times=_times(inputs, flops) if with_benchmark else None,
        warnings=_warnings(inputs, training[0], caching, disk=disk, free_disk=free_disk),
        trained_base=0 if inputs.joint is None else inputs.joint.trained,
    )


def _training(inputs: _Inputs, zero: int) -> Memory:
    """Memory of the stage train at a ZeRO stage."""
    base, load, devices = inputs.base, inputs.load, inputs.device.count
    memory = training_memory(base, inputs.heads, load=load, zero=zero, devices=devices)
    if inputs.joint is None:
        return memory
    return with_joint(memory, base, load=load, joint=inputs.joint, zero=zero, devices=devices)


def _inputs(loaded: LoadedRecipe, *, devices: int | None) -> _Inputs:
    recipe = loaded.recipe
    section = recipe.base_model
    config = load_config(
        section.name_or_path,
        gguf_file=section.gguf_file,
        revision=section.revision,
        trust_remote_code=section.trust_remote_code,
    )
    dtype = "float32" if trained_in_float32(recipe) else section.dtype
    model = meta_model(config, dtype=dtype, trust_remote_code=section.trust_remote_code)
    base = shape_of(model)
    if section.quantization is not None:
        base = replace(base, quantised_bytes=QUANTISED_BYTES[section.quantization])
    heads = _heads(recipe, base)
    # Nothing is logged anywhere, so no tracker is asked for.
    quiet = recipe.model_copy(update={"tracking": TrackingSection(), "deepspeed": None})
    args = training_arguments(quiet, RunDir(loaded.run_dir), run_name=loaded.name)
    train, held_out = _amounts(loaded, batch_size=args.per_device_train_batch_size)
    name = device_name(args.device)
    if args.device.type == "cpu":
        name = f"{name} ({torch.get_num_threads()} threads)"
    return _Inputs(
        loaded=loaded,
        config=config,
        dtype=model.dtype,
        base=base,
        heads=heads,
        args=args,
        train=train,
        held_out=held_out,
        load=_load(recipe, args, train),
        device=Device(
            name=name,
            count=devices or num_devices(args.device),
            free_bytes=free_memory(args.device),
            process_bytes=process_bytes(),
        ),
        joint=None if recipe.train.joint is None else _joint(recipe, model, args),
    )


def _joint(recipe: Recipe, model: PreTrainedModel, args: TrainingArguments) -> JointLoad:
    """How the base is trained; the model without weights is made what it is in training."""
    joint = recipe.train.joint
    assert joint is not None
    make_trainable(model, joint)
    head = model.get_output_embeddings().weight
    names = [name for name, _ in model.named_parameters() if ".lora_A." in name]
    layer = sum(
        p.shape[1]
        for n, p in model.named_parameters()
        if n in names and re.search(r"\.0\.", n.split(".lora_A.")[0])
    )
    is_adapters = joint.trained == "lora"
    return JointLoad(
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        is_adapters=is_adapters,
        adapted_width=layer,
        trains_lm_head=head.requires_grad or any(n.startswith("lm_head.") for n in names),
        has_copy=joint.teacher == "frozen_copy" and needs_original(recipe),
        runs_original=joint.teacher != "stored" and needs_original(recipe),
        is_checkpointed=bool(args.activation_checkpointing),
        keeps_masters=not is_adapters and not trained_in_float32(recipe),
    )


def _heads(recipe: Recipe, base: ModelShape) -> HeadsConfig:
    size = recipe.heads.vocab_size
    if size is not None and size > base.vocab_size:
        raise InputError(
            f"heads.vocab_size: must be at most the base model's {base.vocab_size} tokens, "
            f"got {size}"
        )
    return HeadsConfig(
        num_heads=recipe.heads.num_heads,
        num_layers=recipe.heads.num_layers,
        layout=recipe.heads.layout,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        truncated_vocab_size=size,
        lm_head_bias=base.lm_head_bias,
    )


def _load(recipe: Recipe, args: TrainingArguments, train: Amount) -> Load:
    batch_size = args.per_device_train_batch_size
    positions = batch_positions(train, batch_size=batch_size)
    return Load(
        batch_size=batch_size,
        row_tokens=train.longest,
        batch_positions=positions,
        accumulation=args.gradient_accumulation_steps,
        chunk_size=recipe.train.loss_chunk_size,
        compute_bytes=compute_dtype(recipe.train.compute_dtype, args.device).itemsize,
        is_online=recipe.train.hidden_states == "online" or recipe.train.joint is not None,
        # The stage train loads the base for its lm_head and keeps it, though it does not run it.
        base_is_loaded=True,
        is_host=args.device.type == "cpu",
        soft_targets=recipe.train.soft_target_weight > 0,
        cache_positions=train.positions,
        cached_dtype=recipe.train.hidden_states_dtype,
    )


def _amounts(loaded: LoadedRecipe, *, batch_size: int) -> tuple[Amount, Amount]:
    """The text to train on, and the text held out."""
    section, directory = loaded.recipe.data, Workspace(loaded).data_directory
    if is_dataset(directory):
        return dataset_amounts(
            directory,
            max_length=section.max_length,
            eval_fraction=section.eval_fraction,
            num_heads=loaded.recipe.heads.num_heads,
            batch_size=batch_size,
        )
    row_tokens = answer_tokens = section.max_length
    if section.distill is not None:
        answers = section.distill.turns * section.distill.max_new_tokens
        prompts = section.distill.turns * section.distill.max_prompt_tokens
        row_tokens = min(row_tokens, prompts + answers)
        answer_tokens = min(row_tokens, answers)
    return greatest_amounts(
        None if section.distill is None else section.distill.num_prompts,
        row_tokens=row_tokens,
        answer_tokens=answer_tokens,
        eval_fraction=section.eval_fraction,
        num_heads=loaded.recipe.heads.num_heads,
        batch_size=batch_size,
    )


def _caches(inputs: _Inputs) -> bool:
    """Whether there is a stage hidden-states; base and heads together may have it for a warm-up."""
    return inputs.recipe.train.hidden_states == "cached"


def _caching(inputs: _Inputs) -> Memory:
    train = inputs.train
    most = max(train.most_positions, default=0)
    return caching_memory(
        inputs.base,
        batch_tokens=min(max(MAX_BATCH_TOKENS, train.longest), max(train.tokens, 1)),
        shard_positions=min(train.positions, SHARD_POSITIONS + most),
        cached_dtype=inputs.load.cached_dtype,
        is_host=inputs.load.is_host,
    )


def _disk(inputs: _Inputs) -> Disk:
    args, loaded = inputs.args, inputs.loaded
    saves = 0
    if args.save_strategy != "no":
        every = args.save_steps if args.save_steps >= 1 else args.save_steps * inputs.num_steps
        # There is one at the end in any case.
        is_steps = args.save_strategy == "steps"
        saves = ceil(inputs.num_steps / every if is_steps else inputs.num_epochs)
    limit = args.save_total_limit
    own = Workspace(loaded).data_directory == RunDir(loaded.run_dir).data
    file = RunDir(loaded.run_dir).data / CONVERSATIONS_FILE
    return disk_needed(
        inputs.heads,
        train=inputs.train,
        held_out=inputs.held_out,
        data_bytes=(file.stat().st_size if file.exists() else None) if own else 0,
        cached_dtype=inputs.load.cached_dtype if _caches(inputs) else None,
        caches_held_out=args.eval_strategy != "no",
        # A new one is written before an old one goes.
        kept_checkpoints=saves if limit is None else min(saves, limit + 1),
        keeps_optimizer=not args.save_only_model,
    )


def _times(inputs: _Inputs, flops: work.Flops) -> Times | None:
    chunk_size, device = inputs.load.chunk_size, inputs.args.device
    needed = benchmark_bytes(inputs.base, inputs.heads, chunk_size=chunk_size)
    free = inputs.device.free_bytes
    if free is not None and needed > free:
        warn("one head and one layer do not fit into the free memory, so no time is measured")
        return None
    log("measuring this device for a few seconds")
    train = inputs.train
    speed = measure_speed(
        inputs.heads,
        inputs.config,
        device=device,
        dtype=inputs.dtype,
        compute_dtype=compute_dtype(inputs.recipe.train.compute_dtype, device),
        chunk_size=chunk_size,
        row_tokens=train.tokens // max(1, train.conversations),
    )
    return stage_times(
        speed,
        inputs.base,
        inputs.heads,
        train=train,
        held_out=inputs.held_out,
        flops=flops,
        num_steps=inputs.num_steps,
        num_epochs=inputs.num_epochs,
        accumulation=inputs.load.accumulation,
        devices=inputs.device.count,
        is_online=inputs.load.is_online,
        base_passes=1 if inputs.joint is None else inputs.joint.base_passes,
    )


def _warnings(
    inputs: _Inputs, training: Memory, caching: Memory | None, *, disk: Disk, free_disk: int
) -> tuple[str, ...]:
    load, free = inputs.load, inputs.device.free_bytes
    directory = str(inputs.loaded.run_dir)
    found = [disk_warning(disk, free=free_disk, directory=directory, is_cached=not load.is_online)]
    if free is not None:
        # On the CPU all processes share one memory.
        free = free // inputs.device.count - inputs.device.process_bytes if load.is_host else free
        stages = {"train": training, **({} if caching is None else {"hidden-states": caching})}
        found += [
            memory_warning(
                memory,
                free=free,
                base=inputs.base,
                heads=inputs.heads,
                load=load,
                stage=stage,
                joint=inputs.joint,
            )
            for stage, memory in stages.items()
        ]
    return tuple(line for line in found if line is not None)


def _existing(path: Path) -> Path:
    """The directory itself, or the nearest one above it that is there."""
    absolute = path.absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())
