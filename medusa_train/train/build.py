"""From a recipe to the objects that train: the one place where config objects end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments, set_seed

from medusa_train.base_model.features import output_projection
from medusa_train.base_model.load import BaseModel
from medusa_train.base_model.packed import check_packed_rows
from medusa_train.console import log
from medusa_train.data.conversations import Conversation
from medusa_train.data.teacher_logprobs import TeacherLogprobsReader
from medusa_train.distributed import is_launched
from medusa_train.errors import InputError, InputErrors
from medusa_train.heads.checkpoint import load_heads
from medusa_train.heads.config import BaseIdentity, HeadsConfig
from medusa_train.heads.model import MedusaHeads, most_frequent_tokens, num_candidate_rows
from medusa_train.hidden_states.cache import CachedExamples, CachedHiddenStates, collate_cached
from medusa_train.hidden_states.online import (
    Batch,
    HiddenStateSource,
    OnlineExamples,
    OnlineHiddenStates,
    collate_online,
    collate_packed,
)
from medusa_train.hidden_states.reading import spare_memory
from medusa_train.loss_targets import Teacher
from medusa_train.losses import head_weights
from medusa_train.recipe.deepspeed_block import read_deepspeed
from medusa_train.recipe.schema import HeadsSection, Recipe
from medusa_train.run_dir import RunDir
from medusa_train.train.build_joint import joint_parts
from medusa_train.train.even import even_examples
from medusa_train.train.joint import JointBase
from medusa_train.train.module import HeadsModule
from medusa_train.train.trackers import chosen_trackers, set_environment
from medusa_train.train.tracking import MetricsFile, TrainingLog
from medusa_train.train.trainer import HeadsTrainer

# What a recipe gets where its `trainer:` block says nothing: the published recipe (first release).
_TRAINER_DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "num_train_epochs": 2,
    "per_device_train_batch_size": 8,
    "logging_steps": 10,
    "save_strategy": "steps",
    "save_steps": 200,
    "save_total_limit": 2,
    "eval_strategy": "no",
    # The buffers are constants.
    "ddp_broadcast_buffers": False,
    "ddp_find_unused_parameters": False,
}
# With evaluation, the checkpoint whose chain is longest on the held-out text is the best one.
_BEST_DEFAULTS: dict[str, Any] = {
    "metric_for_best_model": "acceptance_length",
    "greater_is_better": True,
}


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """Where the hidden states of one split lie, and the fingerprint that they must have."""

    directory: Path
    fingerprint: str


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The conversations of a run, split and cut to length, and their cached states if any."""

    train: Sequence[Conversation]
    eval: Sequence[Conversation]
    train_cache: CacheLocation | None
    eval_cache: CacheLocation | None
    chat_template_hash: str | None
    stored: TeacherLogprobsReader | None = None
    """The base's stored log-probabilities of the conversations, where training reads them."""


def build_trainer(
    recipe: Recipe,
    *,
    base: BaseModel,
    data: TrainingData,
    run: RunDir,
    run_name: str,
    original: BaseModel | None = None,
) -> HeadsTrainer:
    """Everything that training needs, from a recipe.

    Args:
        recipe: the recipe.
        base: the loaded base model; Medusa-2 trains it.
        data: the conversations.
        run: where checkpoints and metrics go.
        run_name: the run's name for the trackers, where the recipe has none.
        original: a second copy of the base for Medusa-2, where a copy of what is loaded will not do
            (under ZeRO-3); None makes one if it is needed.

    Raises:
        InputError: the Trainer refuses an argument.
    """
    args = training_arguments(recipe, run, run_name=run_name)
    set_seed(args.seed)
    section = recipe.train.joint
    is_cached = recipe.train.hidden_states == "cached" and section is None
    identity = base_identity(recipe, base, chat_template_hash=data.chat_template_hash)
    heads = new_heads(recipe.heads, base=base, conversations=data.train)
    is_shared = recipe.heads.layout == "shared"
    lm_head = output_projection(base.model) if is_shared and section is None else None
    teacher = _teacher(recipe, base, heads)
    source: HiddenStateSource | JointBase = CachedHiddenStates()
    joint = None
    if section is not None:
        stored = None if data.stored is None else data.stored.kind
        source, joint = joint_parts(recipe, base, original=original, args=args, stored=stored)
    elif not is_cached:
        source = OnlineHiddenStates(base.model)
    module = HeadsModule(
        heads.to(args.device),
        source=source,
        base_config=base.model.config,
        lm_head=lm_head,
        head_weights=head_weights(recipe.heads.num_heads, decay=recipe.train.head_loss_decay),
        chunk_size=recipe.train.loss_chunk_size,
        compute_dtype=compute_dtype(recipe.train.compute_dtype, args.device),
        num_candidates=num_candidate_rows(heads, base.num_tokens),
        teacher=teacher,
        # Other devices have an allocator that does this; DeepSpeed keeps gradients of its own, and
        # those of a trained lm_head that heads share are added up.
        keeps_memory=args.device.type == "cpu"
        and args.deepspeed is None
        and not (is_shared and section is not None),
    )
    callbacks: list[TrainerCallback] = [
        MetricsFile(run.metrics),
        TrainingLog(recipe.heads.num_heads),
    ]
    stored_rows = data.stored if section is not None else None
    train_dataset = _dataset(
        recipe, data.train, data.train_cache if is_cached else None, stored=stored_rows
    )
    spent = train_dataset.kept_bytes if isinstance(train_dataset, CachedExamples) else 0
    return HeadsTrainer(
        module,
        args,
        identity=identity,
        train_dataset=even_examples(
            train_dataset,
            batch_size=args.per_device_train_batch_size,
            num_processes=args.world_size,
        ),
        eval_dataset=(
            _dataset(
                recipe,
                data.eval,
                data.eval_cache if is_cached else None,
                spent=spent,
                stored=stored_rows,
            )
            if args.eval_strategy != "no"
            else None
        ),
        collate=_collate(recipe, base),
        callbacks=callbacks,
        joint=joint,
    )


def training_arguments(recipe: Recipe, run: RunDir, *, run_name: str) -> TrainingArguments:
    """The recipe's ``trainer:`` block over our defaults.

    Raises:
        InputError: transformers refuses a value, or a tracker is not installed.
    """
    # Pinned memory without an accelerator is a warning at every start.
    pinning = {"dataloader_pin_memory": torch.accelerator.is_available()}
    block = {**_TRAINER_DEFAULTS, **pinning, **recipe.train.trainer}
    if block["eval_strategy"] != "no" and "metric_for_best_model" not in block:
        block |= _BEST_DEFAULTS
    if block.get("fsdp") and not torch.accelerator.is_available():
        raise InputError(
            "train.trainer.fsdp: needs accelerators, and there is none; set the recipe's deepspeed "
            "instead, which shards on the CPU too"
        )
    if is_launched() and not torch.accelerator.is_available():
        # Only so does accelerate join the processes of a machine that has the CPU alone.
        block["use_cpu"] = True
    deepspeed = None if recipe.deepspeed is None else _deepspeed(recipe.deepspeed)
    trackers = chosen_trackers(recipe.tracking)
    set_environment(recipe.tracking, run)
    try:
        return TrainingArguments(
            **block,
            output_dir=str(run.checkpoints),
            deepspeed=deepspeed,
            report_to=trackers,
            run_name=recipe.tracking.run_name or run_name,
            disable_tqdm=True,
            remove_unused_columns=False,
            logging_nan_inf_filter=False,
        )
    except (TypeError, ValueError) as error:
        message = str(error).strip().splitlines()[0]
        raise InputError(f"train.trainer: {message}") from error


def _deepspeed(value: str | dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed configuration, once what it needs is there.

    Raises:
        InputError: DeepSpeed is not installed, or cannot use a disk on this machine.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise InputError('deepspeed: is not installed; pip install "medusa-train[deepspeed]"')
    config = read_deepspeed(value)
    zero = config["zero_optimization"]
    offloads = [zero.get(name) or {} for name in ("offload_optimizer", "offload_param")]
    if any(offload.get("device") == "nvme" for offload in offloads):
        from deepspeed.ops.op_builder import AsyncIOBuilder

        if not AsyncIOBuilder().is_compatible(verbose=False):
            raise InputError(
                "deepspeed: offload to nvme needs the library libaio with its headers; install it "
                "(libaio-dev), or offload to the device cpu"
            )
    return config


def new_heads(
    section: HeadsSection, *, base: BaseModel, conversations: Sequence[Conversation]
) -> MedusaHeads:
    """Heads that predict what the base's ``lm_head`` does, in fp32.

    Raises:
        InputError: the truncated vocabulary is larger than the base's.
    """
    weight, bias = output_projection(base.model)
    vocab_size, hidden_size = weight.shape
    token_map: Tensor | None = None
    if section.vocab_size is not None:
        if section.vocab_size > base.num_tokens:
            raise InputError(
                f"heads.vocab_size: must be at most the base model's {base.num_tokens} tokens, "
                f"got {section.vocab_size}"
            )
        labels = [
            token
            for row in conversations
            for start, end in row.assistant_spans
            for token in row.input_ids[start:end]
        ]
        token_map = most_frequent_tokens(
            labels, size=section.vocab_size, vocab_size=base.num_tokens
        )
        known = torch.isin(torch.tensor(labels), token_map).double().mean().item()
        log(f"heads name {section.vocab_size:,} tokens: {known:.2%} of the supervised ones")
    config = HeadsConfig(
        num_heads=section.num_heads,
        num_layers=section.num_layers,
        layout=section.layout,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        truncated_vocab_size=section.vocab_size,
        lm_head_bias=bias is not None,
    )
    heads = MedusaHeads(config, token_map=token_map)
    if section.init_from is None:
        heads.init_from_base(weight, bias)
    else:
        start_from(heads, Path(section.init_from), base_fingerprint=base.fingerprint)
    return heads


def start_from(heads: MedusaHeads, directory: Path, *, base_fingerprint: str) -> None:
    """Give ``heads`` the weights in a heads directory.

    Raises:
        InputError: they are of another base, or of another shape.
    """
    found, _ = load_heads(directory, base_fingerprint=base_fingerprint)
    wrong = [
        f"heads.init_from: {directory}: has {field.name} {theirs}, the recipe has {ours}"
        for field in fields(HeadsConfig)
        if (theirs := getattr(found.config, field.name))
        != (ours := getattr(heads.config, field.name))
    ]
    token_map, other = heads.token_map, found.token_map
    if not wrong and token_map is not None and other is not None and not token_map.equal(other):
        wrong = [
            f"heads.init_from: {directory}: names other tokens than the {len(token_map)} most "
            "frequent ones of this data; train on the same data, or without heads.vocab_size"
        ]
    if wrong:
        raise InputErrors(wrong)
    heads.load_state_dict(found.state_dict())


def base_identity(
    recipe: Recipe, base: BaseModel, *, chat_template_hash: str | None
) -> BaseIdentity:
    """What a heads directory says of its base."""
    return BaseIdentity(
        name_or_path=base.name_or_path,
        fingerprint=base.fingerprint,
        gguf_file=base.gguf_file,
        revision=base.revision,
        chat_template_hash=chat_template_hash,
        max_length=recipe.data.max_length,
    )


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bf16 where the device computes it fast, else fp32."""
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    is_fast = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if is_fast else torch.float32


def _teacher(recipe: Recipe, base: BaseModel, heads: MedusaHeads) -> Teacher | None:
    """The base's own ``lm_head``, its rows in the order of the heads' logits."""
    share = recipe.train.soft_target_weight
    if not share:
        return None
    weight, bias = output_projection(base.model)
    device = next(heads.parameters()).device
    rows = slice(None) if heads.token_map is None else heads.token_map.to(weight.device)
    if recipe.train.joint is not None:
        # The original's, whatever the base is trained to.
        weight = weight.detach().clone()
    return Teacher(
        weight=weight[rows].to(device),
        bias=None if bias is None else bias[rows].to(device),
        share=share,
        adjust=base.logit_rule.apply,
    )


def _collate(recipe: Recipe, base: BaseModel) -> Callable[[Sequence[Batch]], dict[str, Tensor]]:
    """Items → batch.

    Raises:
        InputError: conversations are to be packed, and the base cannot read them so.
    """
    if recipe.train.hidden_states == "cached" and recipe.train.joint is None:
        return collate_cached
    if not recipe.data.packing:
        return collate_online
    check_packed_rows(base.model)
    return partial(collate_packed, capacity=recipe.data.max_length)


def _dataset(
    recipe: Recipe,
    conversations: Sequence[Conversation],
    cache: CacheLocation | None,
    *,
    spent: int = 0,
    stored: TeacherLogprobsReader | None = None,
) -> CachedExamples | OnlineExamples:
    """The examples of one split; ``spent``: bytes of the budget of RAM that are taken."""
    num_heads = recipe.heads.num_heads
    # A base that is trained has a loss at the last one too.
    with_last = recipe.train.soft_target_weight > 0 or recipe.train.joint is not None
    if cache is None:
        return OnlineExamples(
            conversations, num_heads=num_heads, with_last=with_last, stored=stored
        )
    return CachedExamples(
        conversations,
        directory=cache.directory,
        fingerprint=cache.fingerprint,
        num_heads=num_heads,
        with_last=with_last,
        ram_bytes=max(0, ram_bytes(recipe) - spent),
    )


def ram_bytes(recipe: Recipe) -> int:
    """The budget of RAM for cached hidden states."""
    budget = recipe.train.hidden_states_ram
    return spare_memory() if budget is None else int(budget * 2**30)
