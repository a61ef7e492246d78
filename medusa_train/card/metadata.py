"""The card's metadata in the hub's form: what the hub searches, links and tabulates by."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from medusa_train.card.sources import CardSources
from medusa_train.card.usage import LIBRARY, Use
from medusa_train.evaluate.tables import counted, sampling_phrase

TAGS = ("medusa", "speculative-decoding", "text-generation", "medusa-train")
_DIGITS = 4


def card_metadata(sources: CardSources, *, use: Use | None = None) -> ModelCardData:
    """The metadata of a card; keys that are not known are left out.

    Args:
        sources: what is known.
        use: of the files; None for a heads directory.
    """
    base = sources.base
    results = [*_accuracy(sources), *_tree(sources), *_speed(sources), *_quality(sources)]
    return ModelCardData(
        base_model=base.hub_id,
        base_model_relation=None if base.hub_id is None else _relation(sources, use),
        library_name=use.library if use else LIBRARY,
        pipeline_tag="text-generation",
        license=base.license,
        license_name=base.license_name,
        license_link=base.license_link,
        language=list(base.languages) or None,
        tags=[*TAGS, *(use.tags if use else ())],
        datasets=_datasets(sources.recipe) or None,
        metrics=["accuracy"] if results else None,
        model_name=f"Medusa heads for {base.name}" if results else None,
        eval_results=results or None,
    )


def _relation(sources: CardSources, use: Use | None) -> str:
    """Of the hub's four: heads are weights beside those of a base that stays."""
    is_changed = sources.is_joint and use is not None and use.holds_base
    return "finetune" if is_changed else "adapter"


def _accuracy(sources: CardSources) -> list[EvalResult]:
    report = sources.accuracy
    if report is None:
        return []
    text = f"{counted(report['num_conversations'], 'held-out conversation')}, {_text_of(report)}"
    chain = f"tokens per step, top-1 chain of {report['num_heads']}"
    figures = [
        ("accuracy", f"head {head['head']} top-1 ({head['predicts']})", head["top_k_accuracy"][0])
        for head in report["heads"]
    ]
    if report["chain"] is not None:
        figures.append(("acceptance_length", chain, report["chain"]["acceptance_length"]))
    return _results("held-out-conversations", text, figures)


def _tree(sources: CardSources) -> list[EvalResult]:
    report = sources.tree
    if report is None:
        return []
    reported = report["reported"]
    count = counted(reported["num_conversations"], "conversation")
    text = f"{count}, {reported['what']}; {sampling_phrase(reported['text_sampling'])}"
    name = f"tokens per step, tree of {counted(report['num_nodes'], 'node')}"
    figures = [("acceptance_length", name, report["acceptance_length"])]
    return _results("conversations-for-the-tree", text, figures)


def _speed(sources: CardSources) -> list[EvalResult]:
    report = sources.speedup
    if report is None:
        return []
    text = (
        f"{counted(report['num_prompts'], 'prompt')} of {report['prompts']}, greedy, "
        f"{report['device']}, {report['medusa']['dtype']}"
    )
    figures = [
        ("speedup", "times the speed of model.generate", report["speedup"]),
        ("tokens_per_second", "tokens per second", report["medusa"]["tokens_per_second"]),
        ("acceptance_length", "tokens per step while decoding", report["acceptance_length"]),
    ]
    return _results("prompts", text, figures)


def _quality(sources: CardSources) -> list[EvalResult]:
    report = sources.quality
    if report is None:
        return []
    text = f"{counted(report['num_positions'], 'position')} against the original base model"
    figures = [
        ("greedy_agreement", "greedy top-1 agreement", report["greedy_top1_agreement"]),
        ("perplexity_ratio", "perplexity ratio", report["perplexity_ratio"]),
        ("kl", "KL divergence", report["kl"]),
    ]
    return _results("quality-of-the-base", text, figures)


def _results(
    kind: str, text: str, figures: list[tuple[str, str, float | None]]
) -> list[EvalResult]:
    """One result for each figure that there is, all of one text."""
    return [
        EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=kind,
            dataset_name=text,
            metric_type=kind_of_figure,
            metric_name=name,
            metric_value=round(value, _DIGITS),
        )
        for kind_of_figure, name, value in figures
        if value is not None
    ]


def _text_of(report: Mapping[str, Any]) -> str:
    """How the text was drawn; what that means for decoding is said in the card's text."""
    return sampling_phrase(report["text_sampling"]).split(";")[0]


def _datasets(recipe: Mapping[str, Any] | None) -> list[str]:
    """The data sets of the hub that prompts came from."""
    distill = ((recipe or {}).get("data") or {}).get("distill") or {}
    paths = [
        source.get("path") for source in distill.get("sources", []) if source["source"] == "dataset"
    ]
    return [path for path in paths if isinstance(path, str) and not Path(path).exists()]
