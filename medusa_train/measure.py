"""The accuracy of any heads on any text: what ``medusa-eval heads-accuracy`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa_train.console import log
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import Conversation
from medusa_train.data.given import given_conversations
from medusa_train.errors import InputError
from medusa_train.evaluate.heads_accuracy import evaluate_heads
from medusa_train.heads.checkpoint import read_spec
from medusa_train.recipe.load import load_recipe, read_chat_template
from medusa_train.run_dir import RunDir, check_writable
from medusa_train.stages import Workspace
from medusa_train.trained_base import load_trained_base


def measure_heads(
    heads_directory: Path,
    *,
    data: Path | None = None,
    base_model: str | None = None,
    dtype: str = "auto",
    chat_template: str | None = None,
    output: Path | None = None,
    top_k: int = 10,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure heads on ``data``, or on what their own run held out.

    Args:
        heads_directory: the heads.
        data: a data set directory, or a ShareGPT, messages or text file; None for the eval split
            of the run that ``heads_directory`` lies in.
        base_model: hub id or directory; None for the one that the heads name.
        dtype: of the base, as in recipes.
        chat_template: path or text, for chats in a file; None for the tokenizer's own.
        output: write a report into this directory.
        top_k: ranks to report.
        num_bootstrap: resamples for the intervals.
        seed: of the resampling.

    Returns:
        ``heads_accuracy.json`` as an object.

    Raises:
        InputError: wrong heads, base or data; no data given and none of a run found.
    """
    config, identity = read_spec(heads_directory)
    run = RunDir(heads_directory.resolve().parent)
    if data is None and not run.recipe.exists():
        raise InputError(
            f"{heads_directory}: lies in no run directory, so there is no held-out data; give some "
            "with --data"
        )
    if output is not None:
        check_writable(output)
    workspace = None
    if data is None:
        overrides = [f"run_dir={run.root}", f"base_model.dtype={dtype}"]
        if base_model is not None:
            overrides.append(f"base_model.name_or_path={base_model}")
        workspace = Workspace(load_recipe(run.recipe, overrides))
        base = workspace.base if base_model is not None else workspace.trained_base
        rows: Sequence[Conversation] = workspace.data.eval
    else:
        log(f"loading {base_model or identity.name_or_path}")
        base = load_trained_base(heads_directory, base_model, dtype=dtype)
        rows = given_conversations(
            data,
            chat=lambda: ChatTokenizer(
                base.tokenizer,
                stop_ids=base.stop_ids,
                chat_template=read_chat_template(chat_template),
            ),
            num_tokens=base.num_tokens,
            max_length=identity.max_length,
        )
    log(f"{config.num_heads} heads, {len(rows)} conversations")
    return evaluate_heads(
        base,
        heads_directory,
        conversations=rows,
        output=output,
        top_k=top_k,
        num_bootstrap=num_bootstrap,
        seed=seed,
        metrics=run.metrics if run.metrics.exists() else None,
        facts={"text": "held out by the run" if data is None else str(data)},
    )
