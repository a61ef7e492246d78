"""Where prompts come from: a file, or nothing at all but the template's user header (Magpie).

A chat model that is given only what its template puts before a user turn writes a plausible user
turn (Xu et al. 2024, arXiv 2406.08464). It ends at a stop id, or at the text that the template puts
after a user turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_train.console import warn
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.sources import load_prompts_file
from medusa_train.data.template import TemplateRefusedError
from medusa_train.distill import filters
from medusa_train.distill.in_process import InProcessEngine
from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.writer import Answer, Stopping

MAGPIE = "magpie"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        index: its place among all prompts of the generation.
        messages: its turns.
        input_ids: as a server would see them, generation prompt included.
    """

    index: int
    messages: tuple[Mapping[str, Any], ...]
    input_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The prompts of a block, and why others were dropped."""

    prompts: list[Prompt]
    dropped: Counter[str]


def file_prompts(settings: DistillSettings) -> list[list[dict[str, Any]]]:
    """The prompts of ``settings.prompts``, in the file's order, at most ``num_prompts``.

    Raises:
        InputError: the file cannot be read, or holds no prompt.
    """
    assert settings.prompts is not None
    prompts, report = load_prompts_file(Path(settings.prompts))
    for line in report.location_lines():
        warn(line)
    return prompts[: settings.num_prompts]


def encode_prompts(
    messages: Sequence[Sequence[Mapping[str, Any]]],
    *,
    chat: ChatTokenizer,
    settings: DistillSettings,
    first_index: int,
    max_length: int | None,
) -> Drawn:
    """Token ids of prompts, and which are left out: too long, refused, or seen in this block.

    Args:
        messages: the prompts of a block.
        chat: the template.
        settings: the longest prompt, and the system turn.
        first_index: index of the block's first prompt.
        max_length: positions that the model has, or None.
    """
    limit = settings.max_prompt_tokens if max_length is None else max_length - 1
    limit = min(limit, settings.max_prompt_tokens)
    kept: list[Prompt] = []
    dropped: Counter[str] = Counter()
    seen: set[tuple[str, ...]] = set()
    for index, given in enumerate(messages, start=first_index):
        turns = _with_system(given, settings.system_prompt)
        key = filters.prompt_key(turns)
        if key in seen:
            dropped[filters.DUPLICATE_PROMPT] += 1
            continue
        seen.add(key)
        try:
            ids = chat.encode_prompt(turns)
        except TemplateRefusedError:
            dropped[filters.REFUSED_PROMPT] += 1
            continue
        if len(ids) > limit:
            dropped[filters.LONG_PROMPT] += 1
            continue
        kept.append(Prompt(index, tuple(turns), tuple(ids)))
    return Drawn(kept, dropped)


def write_prompts(
    engine: InProcessEngine,
    chat: ChatTokenizer,
    *,
    settings: DistillSettings,
    first_index: int,
    count: int,
    generator: torch.Generator,
    on_step: Callable[[int], None],
) -> Drawn:
    """Let the model write ``count`` user turns from its template's user header (Magpie).

    Args:
        engine: the model.
        chat: its template.
        settings: how prompts are drawn, and the longest.
        first_index: index of the block's first prompt.
        count: user turns to draw.
        generator: of the block.
        on_step: called with the number of tokens of each step.
    """
    header = chat.user_header(system_prompt=settings.system_prompt)
    is_end = _end_of_turn(chat)
    # A longer turn would be dropped as too long. Where a stop id ends it, the template's other ids
    # after it are not for the model to write.
    num_unwritten = len(chat.user_end_ids) - 1 if is_end is None else 0
    limit = settings.max_prompt_tokens - len(header) - num_unwritten
    answers = engine.generate(
        [header] * count,
        sampling=settings.prompt_sampling,
        stopping=Stopping(chat.stop_ids, max(1, limit), is_end),
        generator=generator,
        on_step=on_step,
    )
    dropped: Counter[str] = Counter()
    turns: list[list[dict[str, Any]]] = []
    places: list[int] = []
    for place, answer in enumerate(answers):
        text, fault = _user_text(answer, chat)
        if fault is not None:
            dropped[fault] += 1
            continue
        turns.append([{"role": "user", "content": text}])
        places.append(first_index + place)
    drawn = encode_prompts(
        turns, chat=chat, settings=settings, first_index=0, max_length=engine.max_length
    )
    prompts = [Prompt(places[p.index], p.messages, p.input_ids) for p in drawn.prompts]
    return Drawn(prompts, dropped + drawn.dropped)


def _user_text(answer: Answer, chat: ChatTokenizer) -> tuple[str, str | None]:
    """The user turn that the model wrote, and why it is dropped if it is."""
    tokens = answer.token_ids
    if answer.finish_reason == "length":
        return "", filters.UNFINISHED_PROMPT
    if tokens[-1] in chat.stop_ids:
        text = _decode(tokens[:-1], chat)
        special = set(chat.tokenizer.all_special_ids)
    else:
        # The template's own text ends this turn, special tokens and all.
        text = _decode(tokens, chat).partition(chat.user_end_text.strip())[0]
        special = set()
    text = text.strip()
    if not text:
        return "", filters.EMPTY_PROMPT
    if special & set(tokens[:-1]):
        return "", filters.SPECIAL_PROMPT
    return text, None


def _end_of_turn(chat: ChatTokenizer) -> Callable[[Sequence[int]], bool] | None:
    """What sees the template's text after a user turn; None where a stop id ends the turn."""
    ids = chat.user_end_ids
    if ids and ids[0] in chat.stop_ids:
        return None
    text = chat.user_end_text.strip()
    if not text:
        return None
    # No token holds less than nothing of the text: its characters bound the tokens to look at.
    window = len(text) + 1
    return lambda tokens: text in _decode(tokens[-window:], chat)


def _decode(tokens: Sequence[int], chat: ChatTokenizer) -> str:
    text = chat.tokenizer.decode(
        list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def _with_system(
    turns: Sequence[Mapping[str, Any]], system_prompt: str | None
) -> list[Mapping[str, Any]]:
    if system_prompt is None or any(turn.get("role") == "system" for turn in turns):
        return list(turns)
    return [{"role": "system", "content": system_prompt}, *turns]
