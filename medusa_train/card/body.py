"""The text of a card: what the heads are, how they are used, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_train.card.markdown import bullets, code, heading, picture, plain, table
from medusa_train.card.sources import CardSources
from medusa_train.card.training import TRAINING_PICTURES, data_section, training_section
from medusa_train.card.usage import Use, own_decoder
from medusa_train.evaluate.quality_words import verdict_line
from medusa_train.evaluate.speed_report import result_lines, way_rows
from medusa_train.evaluate.speed_report import text_lines as speed_lines
from medusa_train.evaluate.tables import (
    accuracy_rows,
    chain_line,
    columns,
    counted,
    interval,
    number,
    pay_lines,
    text_lines,
)
from medusa_train.evaluate.tree_report import comparison_columns, comparison_rows
from medusa_train.evaluate.tree_report import text_lines as tree_text_lines

PAPER = "https://arxiv.org/abs/2401.10774"
WRITTEN_BY = "<!-- Written by medusa-train; it may be written again, and then edits are lost. -->"
ACCURACY_PICTURES = ("top_1_accuracy", "accepted", "position")
TREE_PICTURES = ("tree",)
QUALITY_PICTURES = ("quality_agreement", "quality_kl")
SPEED_PICTURES = ("speed", "speed_by_category", "speed_by_batch_size")
PICTURES = (
    *ACCURACY_PICTURES, *TREE_PICTURES, *SPEED_PICTURES, *QUALITY_PICTURES, *TRAINING_PICTURES,
)  # fmt: skip
"""Every picture that a card may show."""


def card_body(sources: CardSources, *, use: Use | None = None) -> str:
    """The card below its metadata.

    Args:
        sources: what is known.
        use: of the files; None for a heads directory.
    """
    parts = [
        f"# Medusa heads for {code(sources.base.name)}",
        WRITTEN_BY,
        _introduction(sources, holds_base=use is not None and use.holds_base),
        *_headline(sources),
        heading("Use"),
        own_decoder(sources) if use is None else use.text.strip(),
        *_accuracy(sources),
        *_tree(sources),
        *_speed(sources),
        *_quality(sources),
        *training_section(sources),
        *data_section(sources),
        heading("What to know"),
        bullets(_limits(sources, is_export=use is not None)),
    ]
    return "\n\n".join(parts) + "\n"


def _introduction(sources: CardSources, *, holds_base: bool) -> str:
    base, config = sources.base, sources.config
    name = code(base.name)
    if base.hub_id is not None:
        name = f"[{name}](https://huggingface.co/{base.hub_id})"
    heads = (
        f"With {counted(config.num_heads, 'small head')} beside it, {name} writes several tokens in"
    )
    if holds_base:
        files = "The model itself is among these files."
    elif sources.is_joint:
        files = (
            "These files are the heads alone: the model that was trained together with them is "
            "needed too."
        )
    else:
        files = (
            "These files are the heads alone: the model itself is needed too, and is not changed."
        )
    return (
        f"{heads} a step. From a hidden state of the model the heads guess the tokens after the "
        "next one; the model checks the guesses in one pass and keeps those that it would have "
        "written. "
        "Greedy text stays what the model writes alone, and sampled text keeps its distribution "
        f"([Cai et al. 2024]({PAPER})). {files}"
    )


def _headline(sources: CardSources) -> list[str]:
    rows = []
    if (speed := sources.speedup) is not None:
        where = f"{speed['device']}, {speed['medusa']['dtype']}, {speed['prompts']}"
        what = f"times the speed of `model.generate` ({where})"
        rows.append([what, *_figure(speed, "speedup", digits=2)])
    if (tree := sources.tree) is not None:
        what = f"tokens per step with a tree of {counted(tree['num_nodes'], 'node')}"
        rows.append([what, number(tree["acceptance_length"]), interval(tree["ci95"])])
    if (report := sources.accuracy) is not None:
        chain, first = report["chain"], report["heads"][0]
        if chain is not None:
            what = f"tokens per step with the top-1 chain of {report['num_heads']}"
            rows.append([what, number(chain["acceptance_length"]), interval(chain["ci95"])])
        top1 = first["top_k_accuracy"][0]
        rows.append(["top-1 accuracy of head 1", number(top1), interval(first["top1_ci95"])])
    return [table(["figure", "value", "95 %"], rows)] if rows else []


def _accuracy(sources: CardSources) -> list[str]:
    report = sources.accuracy
    if report is None:
        return []
    return [
        heading("Accuracy"),
        "How often a head is right on conversations that it was not trained on. Conditional: where "
        "all heads before it are right. Top-n: the true token is among the head's n most likely "
        "ones.",
        table(columns(report), accuracy_rows(report)),
        *([] if report["chain"] is None else [plain(chain_line(report)) + "."]),
        bullets([*([] if report["chain"] is None else pay_lines(report)), *text_lines(report)]),
        *map(picture, sources.pictures_named(*ACCURACY_PICTURES)),
    ]


def _tree(sources: CardSources) -> list[str]:
    report = sources.tree
    if report is None and sources.tree_paths is None:
        return []
    size = len(sources.tree_paths or ()) if report is None else report["num_nodes"]
    found = (
        f"These heads come with a tree of {counted(size, 'node')}: the candidates that a step "
        "checks at once, each a path of ranks. `medusa_choices.json` lists it, where the engine "
        "takes that file."
    )
    if report is None:
        return [heading("Candidate tree"), found]
    return [
        heading("Candidate tree"),
        found,
        table(comparison_columns(report), comparison_rows(report)),
        bullets([*tree_text_lines(report), *report["notes"]]),
        *map(picture, sources.pictures_named(*TREE_PICTURES)),
    ]


def _speed(sources: CardSources) -> list[str]:
    report = sources.speedup
    if report is None:
        return []
    head, *rows = way_rows(report)
    return [
        heading("Speed"),
        "Wall-clock time against plain decoding of the same prompts. Another device, dtype or text "
        "has another speed-up.",
        bullets([*result_lines(report), *speed_lines(report)]),
        table(head, rows),
        *map(picture, sources.pictures_named(*SPEED_PICTURES)),
    ]


def _quality(sources: CardSources) -> list[str]:
    report = sources.quality
    if report is None:
        return []
    rows = [
        [what, *_figure(report, key)]
        for key, what in (
            ("greedy_top1_agreement", "positions where both would write the same token"),
            ("perplexity_ratio", "perplexity, changed model ÷ original"),
            ("kl", "KL divergence from the original, nats per position"),
        )
    ]
    count = counted(report["num_positions"], "position")
    return [
        heading("Has the base model changed?"),
        f"It was trained with the heads. Against the original, on {count}:",
        table(["figure", "value", "95 %"], rows),
        plain(verdict_line(report)) + ".",
        *map(picture, sources.pictures_named(*QUALITY_PICTURES)),
    ]


def _figure(report: Mapping[str, Any], key: str, *, digits: int = 3) -> list[str]:
    return [number(report[key], digits=digits), interval(report[f"{key}_ci95"], digits=digits)]


def _limits(sources: CardSources, *, is_export: bool) -> list[str]:
    config, identity = sources.config, sources.identity
    lines = [
        f"The heads belong to the base model with fingerprint `{identity.fingerprint}`. With "
        "another fine-tune the text would stay that model's own, but fewer guesses are right: "
        "medusa-train refuses it."
    ]
    if is_export and sources.accuracy is not None:
        lines.append(
            "All figures were measured with the heads as they were trained, in medusa-train's own "
            "decoder. An engine without candidate trees has the chain's acceptance length."
        )
    if identity.gguf_file is not None:
        lines.append(f"The base model is the GGUF file {code(identity.gguf_file)}.")
    if identity.revision is not None:
        lines.append(f"The base model is that of the revision {code(identity.revision)}.")
    if config.truncated_vocab_size is not None:
        lines.append(
            f"They name {config.num_logits:,} of {config.vocab_size:,} tokens. Others are never "
            "guessed, and count as misses above."
        )
    if identity.max_length is not None:
        lines.append(
            f"They were trained on conversations of at most {identity.max_length:,} tokens."
        )
    if identity.chat_template_hash is not None:
        lines.append(
            f"They were trained with the chat template of hash `{identity.chat_template_hash}`; "
            "other formats are other text to them."
        )
    rule = sources.stage("train").get("logit_rule")
    if rule is not None and (rule["scale"] != 1.0 or rule["soft_cap"] is not None):
        lines.append(_rule_line(rule))
    if sources.base.license is not None:
        lines.append(f"The licence above is that of the base model, {code(sources.base.license)}.")
    return lines


def _rule_line(rule: Mapping[str, Any]) -> str:
    parts = []
    if rule["scale"] != 1.0:
        parts.append(f"multiplies the output of its `lm_head` by {rule['scale']:g}")
    if rule["soft_cap"] is not None:
        parts.append(f"caps its logits softly at {rule['soft_cap']:g}")
    return (
        f"The base model {' and '.join(parts)}. The heads' logits are before that; it is "
        "increasing, so it changes no rank and no guess."
    )
