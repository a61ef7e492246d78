"""The accuracy of a heads directory on some conversations: ranks, figures, report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_train.base_model.features import output_projection
from medusa_train.base_model.load import BaseModel
from medusa_train.data.conversations import Conversation
from medusa_train.errors import InputError
from medusa_train.evaluate.accuracy import accuracy_report
from medusa_train.evaluate.chain import step_weights
from medusa_train.evaluate.ranks import RANKS_FILE, Ranks, compute_ranks, read_ranks
from medusa_train.evaluate.report import REPORT_FILE, write_report
from medusa_train.evaluate.tree_report import write_tree
from medusa_train.heads.checkpoint import heads_fingerprint, load_heads, read_spec
from medusa_train.heads.config import HeadsConfig
from medusa_train.json_values import fingerprint, read_json


def evaluate_heads(
    base: BaseModel,
    heads_directory: Path,
    *,
    conversations: Sequence[Conversation],
    output: Path | None,
    top_k: int = 10,
    num_bootstrap: int = 1000,
    seed: int = 0,
    metrics: Path | None = None,
    facts: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Measure the heads in ``heads_directory`` and write the report.

    Args:
        base: the base that the heads were trained on.
        heads_directory: the heads.
        conversations: text that the heads were not trained on.
        output: directory of the report; None writes none.
        top_k: ranks to report.
        num_bootstrap: resamples for the intervals.
        seed: of the resampling.
        metrics: ``metrics.jsonl`` of the training run, for its curves.
        facts: further lines for the report's head.

    Returns:
        ``heads_accuracy.json`` as an object.

    Raises:
        InputError: the heads belong to another base, or there is no conversation with an answer.
    """
    if not any(row.num_supervised for row in conversations):
        raise InputError(f"{heads_directory}: no conversation with an answer to measure on")
    weight, _ = output_projection(base.model)
    heads, identity = load_heads(
        heads_directory,
        base_fingerprint=base.fingerprint,
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0],
        device=base.device,
    )
    ranks = compute_ranks(
        base,
        heads,
        conversations=conversations,
        top_k=top_k,
        metadata={
            "text_sampling": text_sampling(conversations),
            "base_fingerprint": base.fingerprint,
            "heads_fingerprint": heads_fingerprint(heads_directory),
            "conversation_ids": [row.id for row in conversations],
            "data_fingerprint": fingerprint([row.id for row in conversations]),
            "base_dtype": str(base.model.dtype).removeprefix("torch."),
        },
    )
    report = accuracy_report(
        ranks,
        base_model=identity.name_or_path,
        num_bootstrap=num_bootstrap,
        seed=seed,
        step=step_weights(base, heads.config),
    )
    if output is not None:
        write_report(
            report,
            directory=output,
            ranks=ranks,
            metrics=metrics,
            facts={**_known(heads.config, ranks), **(facts or {})},
        )
    return report


def add_tree(
    result: Mapping[str, Any],
    *,
    report_directory: Path,
    heads_directory: Path,
    metrics: Path | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the tree, and the report that is there once more with it.

    Args:
        result: ``tree.json`` as an object, from the report's ranks.
        report_directory: of the report.
        heads_directory: gets ``medusa_choices.json``.
        metrics: ``metrics.jsonl`` of the training run, for its curves.
        facts: further lines for the report's head.
    """
    ranks = read_ranks(report_directory / RANKS_FILE)
    report = read_json(report_directory / REPORT_FILE)
    report["tree"] = {
        "num_nodes": result["num_nodes"],
        "acceptance_length": result["acceptance_length"],
        "ci95": result["ci95"],
        "num_conversations": result["reported"]["num_conversations"],
    }
    config, _ = read_spec(heads_directory)
    write_report(
        report,
        directory=report_directory,
        ranks=ranks,
        metrics=metrics,
        facts={**_known(config, ranks), **(facts or {})},
        tree=result,
    )
    write_tree(result, directory=report_directory, choices=heads_directory)


def _known(config: HeadsConfig, ranks: Ranks) -> dict[str, str]:
    """Lines for the report's head that the heads and the ranks tell."""
    return {
        "heads": f"{config.num_heads}, layers {config.num_layers}, layout {config.layout}",
        "vocabulary of the heads": f"{config.num_logits:,} of {config.vocab_size:,} tokens",
        "base model in": ranks.metadata["base_dtype"],
    }


def text_sampling(conversations: Sequence[Conversation]) -> Any:
    """How the text was drawn: one setting where all rows agree, else all of them; None if given."""
    kinds = {fingerprint(row.sampling): row.sampling for row in conversations}
    settings = [kinds[key] for key in sorted(kinds)]
    return settings[0] if len(settings) == 1 else settings
