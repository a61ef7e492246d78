"""The stage ``train``: the heads alone, or with the base, as often as a guard goes back."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from medusa_train.base_model.load import BaseModel
from medusa_train.console import log
from medusa_train.distributed import num_processes, on_main
from medusa_train.errors import InputError
from medusa_train.heads.checkpoint import SPEC_FILE
from medusa_train.recipe.schema import Recipe
from medusa_train.run_dir import RunDir
from medusa_train.stages import Workspace
from medusa_train.train.build import build_trainer
from medusa_train.train.checkpoints import last_checkpoint
from medusa_train.train.guard import Guard
from medusa_train.train.result import save_result
from medusa_train.train.rollback import read_rollbacks, remove_undone
from medusa_train.train.trainer import HeadsTrainer

# Of a recipe's base, what decides which weights are read.
_LOADING_KEYS = frozenset({"revision", "dtype", "trust_remote_code"})


def train(workspace: Workspace) -> Mapping[str, Any]:
    """Train what the recipe says, and write it; all processes call it.

    Returns:
        What the manifest says of the stage.

    Raises:
        InputError: no conversation is held out, and training is to be evaluated.
    """
    run, data = workspace.run, workspace.data
    if workspace.evaluates_while_training and not data.eval:
        raise InputError(
            "train.trainer.eval_strategy: no conversation is held out to evaluate on; raise "
            "data.eval_fraction, or set eval_strategy to 'no'"
        )
    recipe = workspace.recipe
    heads = _warm_up(workspace) if recipe.train.joint and recipe.train.joint.warm_up else None
    if heads is not None:
        section = recipe.heads.model_copy(update={"init_from": str(heads)})
        recipe = recipe.model_copy(update={"heads": section})
    trainer, base = _trained(workspace, recipe)
    while trainer.guard is not None and trainer.guard.rolls_back:
        _roll_back(trainer.guard, run)
        # The next ones may not fit beside them.
        del trainer, base
        _free_memory()
        trainer, base = _trained(workspace, recipe)
    save_result(
        trainer,
        run,
        original=recipe.base_model.model_dump(include={"name_or_path", *_LOADING_KEYS}),
        tokenizer=base.tokenizer,
    )
    if not recipe.train.keep_hidden_states:
        on_main(lambda: shutil.rmtree(run.hidden_states, ignore_errors=True))
    result = trainer.guarded_checkpoint()
    rollbacks = [asdict(rollback) for rollback in read_rollbacks(run.checkpoints)]
    return {
        "steps": trainer.state.global_step,
        "seed": trainer.args.seed,
        "processes": num_processes(),
        "logit_rule": asdict(base.logit_rule),
        **({"rollbacks": rollbacks} if rollbacks else {}),
        **({} if result is None else {"result": result.name}),
        **_best(trainer.state, recipe),
    }


def _trained(workspace: Workspace, recipe: Recipe) -> tuple[HeadsTrainer, BaseModel]:
    """Load the base, and train from the last checkpoint to the end or until a guard goes back."""
    base, original = (
        workspace.joint_base() if recipe.train.joint else (workspace.training_base(), None)
    )
    trainer = build_trainer(
        recipe,
        base=base,
        data=workspace.data,
        run=workspace.run,
        run_name=workspace.loaded.name,
        original=original,
    )
    _fit(trainer, workspace.run)
    # Models that are loaded from here on are not the training's, and are not sharded.
    unset_hf_deepspeed_config()
    return trainer, base


def _fit(trainer: HeadsTrainer, run: RunDir) -> None:
    on_main(lambda: remove_undone(run.checkpoints))
    checkpoint = last_checkpoint(run.checkpoints)
    if checkpoint is not None:
        log(f"going on from {checkpoint}")
    trainer.fit(checkpoint)


def _roll_back(guard: Guard, run: RunDir) -> None:
    on_main(lambda: guard.roll_back(run.checkpoints))


def _free_memory() -> None:
    """What a Trainer holds is in circles."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _warm_up(workspace: Workspace) -> Path:
    """Train the heads alone, where that is not done yet; return their directory."""
    recipe, run = workspace.recipe, workspace.run.warm_up
    joint = recipe.train.joint
    assert joint is not None
    assert joint.warm_up is not None
    if on_main((run.heads / SPEC_FILE).exists):
        log("warm-up: done")
        return run.heads
    log("warm-up: the heads alone")
    block = {**recipe.train.trainer, **joint.warm_up.trainer}
    # A frozen base keeps no activations.
    kept = {key: value for key, value in block.items() if "_checkpointing" not in key}
    alone = recipe.train.model_copy(update={"method": "medusa1", "medusa2": None, "trainer": kept})
    base = workspace.training_base()
    trainer = build_trainer(
        recipe.model_copy(update={"train": alone}),
        base=base,
        data=workspace.data,
        run=run,
        run_name=f"{workspace.loaded.name} warm-up",
    )
    _fit(trainer, run)
    save_result(trainer, run, original={}, tokenizer=base.tokenizer)
    unset_hf_deepspeed_config()
    return run.heads


def _best(state: TrainerState, recipe: Recipe) -> Mapping[str, Any]:
    """The checkpoint that was best on the held-out text, if there was evaluation."""
    if state.best_global_step is None or state.best_metric is None:
        return {}
    name = recipe.train.trainer.get("metric_for_best_model", "acceptance_length")
    return {"best_step": state.best_global_step, f"best_{name}": state.best_metric}
