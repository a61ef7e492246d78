"""How a changed base model is measured against the original."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medusa_train.quality.judge import JudgeOptions

NUM_ANSWERS = 20
MAX_NEW_TOKENS = 192
MIN_AGREEMENT = 0.98
MAX_PERPLEXITY_RATIO = 1.02


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """What is compared, and on which text.

    Attributes:
        base_model: hub id or directory of the original; None for the one that the run or the
            adapters name.
        model: directory of the changed model or of its adapters; None for the run's.
        data: conversations to measure on; None for what the run held out, unless there are prompts.
        prompts: a file; the text is then the original's greedy answers to them.
        chat_template: path or text; None for the run's, else the tokenizer's own.
        num_prompts: the first so many prompts; None for all.
        num_answers: prompts that both models answer, to be read side by side; 0 for none.
        max_new_tokens: most tokens of an answer.
        min_agreement: the greedy agreement that is wanted.
        max_perplexity_ratio: the perplexity ratio that is allowed.
        judge: who judges the answers of both; None for nobody.
        lm_eval: tasks of lm-eval, by name or path.
        lm_eval_option: what the user calls them.
        lm_eval_limit: the first so many samples of each task; None for all.
        num_bootstrap: resamples of the conversations for the intervals.
        seed: of the resampling.
        output: directory of the report; None writes none.
    """

    base_model: str | None = None
    model: Path | None = None
    data: Path | None = None
    prompts: Path | None = None
    chat_template: str | None = None
    num_prompts: int | None = None
    num_answers: int = NUM_ANSWERS
    max_new_tokens: int = MAX_NEW_TOKENS
    min_agreement: float = MIN_AGREEMENT
    max_perplexity_ratio: float = MAX_PERPLEXITY_RATIO
    judge: JudgeOptions | None = None
    lm_eval: tuple[str, ...] = ()
    lm_eval_option: str = "--lm-eval"
    lm_eval_limit: int | None = None
    num_bootstrap: int = 1000
    seed: int = 0
    output: Path | None = None
