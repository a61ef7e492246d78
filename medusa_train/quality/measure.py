"""One measurement of a changed base model against the original."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from medusa_train.base_model.changed import is_adapters
from medusa_train.console import log, warn
from medusa_train.data.conversations import Conversation
from medusa_train.distill.writer import Answer
from medusa_train.evaluate.quality import quality_figures, verdict
from medusa_train.evaluate.quality_report import write_quality
from medusa_train.plan.device import device_name
from medusa_train.quality.answers import BothAnswers, answered, answers_report, write_answers
from medusa_train.quality.compare import measure_drift
from medusa_train.quality.judge import Judge, judge_report
from medusa_train.quality.options import QualityOptions
from medusa_train.quality.pair import DTYPE, Pair, load_pair
from medusa_train.quality.subject import Subject, find_subject
from medusa_train.quality.tasks import check_tasks, run_tasks
from medusa_train.quality.texts import Texts, load_texts
from medusa_train.run_dir import check_writable

REPORT_VERSION = 1


def measure_quality(run: Path | None, *, options: QualityOptions) -> dict[str, Any]:
    """Measure how far the base model of a run has moved, or any changed model.

    Args:
        run: the run directory; None where ``options`` name the changed model and the original.
        options: how.

    Returns:
        ``quality.json`` as an object (docs/formats.md).

    Raises:
        InputError: wrong models, text or prompts.
    """
    subject = find_subject(
        run,
        base_model=options.base_model,
        model=options.model,
        chat_template=options.chat_template,
    )
    if options.output is not None:
        check_writable(options.output)
    return compare_models(subject, options)


def compare_models(subject: Subject, options: QualityOptions) -> dict[str, Any]:
    """Measure a changed model, and write the report; see :func:`measure_quality`."""
    if options.lm_eval:
        check_tasks(options.lm_eval, option=options.lm_eval_option)
    with nullcontext() if options.judge is None else Judge(options.judge) as judge:
        if judge is not None:
            judge.check()
        return _compare(subject, options, judge)


def _compare(subject: Subject, options: QualityOptions, judge: Judge | None) -> dict[str, Any]:
    texts = load_texts(subject, options)
    if subject.changed_fingerprint == subject.original_fingerprint:
        warn(f"{subject.changed}: is the original itself, so nothing can have moved")
    pair = load_pair(subject.loading, changed=subject.changed)
    rows, both = _rows_and_answers(pair, texts, options)
    log(f"{len(rows)} conversations, {len(both)} prompts answered by both models")
    figures = quality_figures(
        measure_drift(pair, rows), num_bootstrap=options.num_bootstrap, seed=options.seed
    )
    limits = {
        "min_agreement": options.min_agreement,
        "max_perplexity_ratio": options.max_perplexity_ratio,
    }
    report: dict[str, Any] = {
        "schema_version": REPORT_VERSION,
        "base_model": pair.original.name_or_path,
        "base_fingerprint": subject.original_fingerprint,
        "changed_model": str(subject.changed),
        "changed_fingerprint": subject.changed_fingerprint,
        "changed_is": "adapters" if is_adapters(subject.changed) else "model",
        "dtype": DTYPE,
        "device": device_name(pair.original.device),
        "text": texts.what,
        **figures,
        "verdict": verdict(figures, **limits),
        "answers": (
            answers_report(both, pair=pair, max_new_tokens=options.max_new_tokens) if both else None
        ),
        "judge": None,
        "lm_eval": None,
    }
    _write(report, options)
    if options.lm_eval:
        report["lm_eval"] = run_tasks(pair, options.lm_eval, limit=options.lm_eval_limit)
        _write(report, options)
    if judge is not None and not both:
        warn(f"{texts.what}: has no prompt that both models could answer, so nothing is judged")
    elif judge is not None:
        report["judge"] = judge_report(
            judge,
            report["answers"]["rows"],
            num_bootstrap=options.num_bootstrap,
            seed=options.seed,
        )
        _write(report, options)
    return report


def _write(report: Mapping[str, Any], options: QualityOptions) -> None:
    """Write what is known so far: a judge that fails later takes nothing away."""
    if options.output is not None:
        write_quality(report, directory=options.output)


def _rows_and_answers(
    pair: Pair, texts: Texts, options: QualityOptions
) -> tuple[Sequence[Conversation], list[BothAnswers]]:
    """The text to measure on, and what both models answer to the first prompts."""
    first = texts.prompts[: options.num_answers]
    written = write_answers(pair, "original", first, max_new_tokens=options.max_new_tokens)
    changed = write_answers(pair, "changed", first, max_new_tokens=options.max_new_tokens)
    both = [
        BothAnswers(prompt, ours, theirs)
        for prompt, ours, theirs in zip(first, written, changed, strict=True)
    ]
    if texts.rows is not None:
        return texts.rows, both
    # In blocks of their own, so that those of the first prompts are alike for both models.
    more: list[Answer] = write_answers(
        pair, "original", texts.prompts[len(first) :], max_new_tokens=options.max_new_tokens
    )
    answers = zip(texts.prompts, [*written, *more], strict=True)
    return [answered(prompt, answer) for prompt, answer in answers], both
