"""Greedy answers of both models to the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from medusa_train.console import progress
from medusa_train.data.conversations import Conversation
from medusa_train.distill.in_process import InProcessEngine
from medusa_train.distill.sampling import Sampling
from medusa_train.distill.writer import Answer, Stopping
from medusa_train.evaluate.equality import first_difference
from medusa_train.json_values import fingerprint
from medusa_train.quality.pair import Pair, Side
from medusa_train.speed.prompts import Prompt

BLOCK = 16
"""Prompts that are answered together. Results depend on that, so it is the same for both models."""


@dataclass(frozen=True, slots=True)
class BothAnswers:
    """What both models answer to one prompt.

    Attributes:
        prompt: the prompt.
        original: the original's answer.
        changed: the changed model's.
    """

    prompt: Prompt
    original: Answer
    changed: Answer


def write_answers(
    pair: Pair, side: Side, prompts: Sequence[Prompt], *, max_new_tokens: int
) -> list[Answer]:
    """One model's greedy answers.

    Raises:
        InputError: its cache cannot be used so; names the model.
    """
    if not prompts:
        return []
    answers: list[Answer] = []
    with pair.using(side) as base:
        engine = InProcessEngine(base.model, vocab_size=base.num_tokens, max_rows=BLOCK)
        stopping = Stopping(frozenset(base.stop_ids), max_new_tokens)
        with progress(f"answers of the {side} model", len(prompts)) as bar:
            for first in range(0, len(prompts), BLOCK):
                block = [prompt.ids for prompt in prompts[first : first + BLOCK]]
                answers += engine.generate(
                    block,
                    sampling=Sampling(0.0),
                    stopping=stopping,
                    generator=torch.Generator(base.device),
                )
                bar.update(len(block), detail="prompts")
    return answers


def answered(prompt: Prompt, answer: Answer) -> Conversation:
    """A prompt and its greedy answer as a text to measure on."""
    ids = (*prompt.ids, *answer.token_ids)
    return Conversation(
        id=fingerprint(ids),
        source="prompts",
        messages=(),
        input_ids=ids,
        assistant_spans=((len(prompt.ids), len(ids)),),
        finish_reasons=(answer.finish_reason,),
        sampling={"temperature": 0.0},
    )


def answers_report(
    both: Sequence[BothAnswers], *, pair: Pair, max_new_tokens: int
) -> dict[str, Any]:
    """``answers`` of ``quality.json``: how far the answers are the same, and their texts."""
    rows = [_row(answers, pair) for answers in both]
    num_tokens = sum(row["original_tokens"] for row in rows)
    num_same = sum(
        row["original_tokens"] if row["first_difference"] is None else row["first_difference"]
        for row in rows
    )
    return {
        "num_prompts": len(rows),
        "num_identical": sum(row["first_difference"] is None for row in rows),
        "shared_beginning": num_same / num_tokens,
        "max_new_tokens": max_new_tokens,
        "rows": rows,
    }


def _row(answers: BothAnswers, pair: Pair) -> dict[str, Any]:
    prompt, tokenizer = answers.prompt, pair.original.tokenizer
    texts = [
        tokenizer.decode(list(ids), skip_special_tokens=skip)
        for ids, skip in (
            (prompt.ids, False),
            (answers.original.token_ids, True),
            (answers.changed.token_ids, True),
        )
    ]
    return {
        "question": prompt.question or texts[0],
        "category": prompt.category,
        "original": texts[1],
        "changed": texts[2],
        "original_tokens": len(answers.original.token_ids),
        "changed_tokens": len(answers.changed.token_ids),
        "original_finish": answers.original.finish_reason,
        "changed_finish": answers.changed.finish_reason,
        "first_difference": first_difference(answers.original.token_ids, answers.changed.token_ids),
    }
