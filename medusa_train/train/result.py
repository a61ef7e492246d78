"""What a training run leaves: heads, and what became of a base that was trained with them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from medusa_train.base_model.trained import save_trained, write_trained_base
from medusa_train.console import log
from medusa_train.distributed import on_main
from medusa_train.heads.checkpoint import WEIGHTS_FILE, save_tensors
from medusa_train.heads.config import BaseIdentity
from medusa_train.run_dir import RunDir, atomic_directory
from medusa_train.train.joint_training import trained_identity
from medusa_train.train.trainer import HeadsTrainer


def save_result(
    trainer: HeadsTrainer,
    run: RunDir,
    *,
    original: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write ``heads/`` last, and before it ``adapters/`` or ``base/`` of a base that was trained.

    All processes call it; where a guard has stopped the run, the last good checkpoint is written.

    Args:
        trainer: after training.
        run: where.
        original: name and options of transformers' ``from_pretrained``, for the base.
        tokenizer: the base's.
    """
    checkpoint = trainer.guarded_checkpoint()
    tensors, trained = trainer.whole_tensors(), trainer.trained_tensors()

    def save() -> None:
        heads, identity = tensors, trainer.identity
        if checkpoint is not None:
            log(f"the result is {checkpoint}, the last one below the limit")
            heads = load_file(checkpoint / WEIGHTS_FILE)
        if trainer.joint is not None:
            identity = _save_base(trainer, run, trained, checkpoint=checkpoint, original=original)
            if trainer.joint.adapters is None:
                tokenizer.save_pretrained(run.base)
        with atomic_directory(run.heads) as temporary:
            config = trainer.module.heads.config
            save_tensors(heads, temporary, config=config, base=identity)
            tokenizer.save_pretrained(temporary)

    on_main(save)


def _save_base(
    trainer: HeadsTrainer,
    run: RunDir,
    trained: Mapping[str, Tensor],
    *,
    checkpoint: Path | None,
    original: Mapping[str, Any],
) -> BaseIdentity:
    """Write what became of the base; what the heads then say of it."""
    joint = trainer.joint
    assert joint is not None

    def put(directory: Path) -> None:
        if checkpoint is None:
            save_trained(trained, directory, adapters=joint.adapters)
        else:
            shutil.copytree(checkpoint / joint.directory_name, directory, dirs_exist_ok=True)

    if joint.adapters is not None:
        with atomic_directory(run.adapters) as temporary:
            put(temporary)
        return trained_identity(trainer.identity, run.adapters, directory=f"../{run.adapters.name}")
    with tempfile.TemporaryDirectory(dir=run.root) as name, atomic_directory(run.base) as temporary:
        weights = Path(name)
        put(weights)
        fingerprint = trainer.identity.fingerprint
        write_trained_base(original, weights, temporary, original_fingerprint=fingerprint)
        return trained_identity(trainer.identity, weights, directory=f"../{run.base.name}")
