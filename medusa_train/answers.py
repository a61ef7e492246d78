"""One answer to one prompt, with what it took: what ``medusa-eval generate`` and ``chat`` show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers.generation.streamers import BaseStreamer

from medusa_train.data.chat import ChatTokenizer
from medusa_train.decoding.acceptance import Typical
from medusa_train.decoding.generate import Generated
from medusa_train.errors import InputError
from medusa_train.medusa_model import GREEDY, MedusaModel


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How an answer is written.

    Attributes:
        max_new_tokens: its most tokens.
        temperature: 0 is greedy.
        top_p: the nucleus; 1 is off.
        top_k: the most probable tokens only; 0 is off.
        typical: typical acceptance instead of exact sampling.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    typical: Typical | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What was written.

    Attributes:
        text: without special tokens.
        num_tokens: written, an end-of-turn token included.
        finish_reason: ``stop``: the model ended it; ``length``: the limit; ``interrupted``.
        seconds: prompt and answer.
        prefill_seconds: of them, up to the first token.
        acceptance_length: tokens ÷ steps.
    """

    text: str
    num_tokens: int
    finish_reason: Literal["stop", "length", "interrupted"]
    seconds: float
    prefill_seconds: float
    acceptance_length: float

    def facts(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "text": self.text,
            "num_tokens": self.num_tokens,
            "finish_reason": self.finish_reason,
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "tokens_per_second": self.num_tokens / self.seconds,
            "acceptance_length": self.acceptance_length,
        }

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.num_tokens} tokens in {self.seconds:.1f} s "
            f"({self.num_tokens / self.seconds:.1f} tokens/s), "
            f"acceptance length {self.acceptance_length:.2f}"
        )


def prompt_ids(
    model: MedusaModel, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None
) -> list[int]:
    """The ids of a conversation that waits for its next answer.

    Raises:
        InputError: there is no chat template, or it refuses the messages.
    """
    base = model.base
    chat = ChatTokenizer(base.tokenizer, stop_ids=base.stop_ids, chat_template=chat_template)
    if not chat.has_template:
        raise InputError(
            f"{base.name_or_path}: its tokenizer has no chat template; give one with "
            "--chat-template, or the text as it is with --raw"
        )
    return chat.encode_prompt(messages)


def write_answer(
    model: MedusaModel,
    ids: Sequence[int],
    *,
    options: AnswerOptions,
    streamer: BaseStreamer | None = None,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Answer:
    """Write one answer.

    Args:
        model: it writes.
        ids: the prompt.
        options: how.
        streamer: gets each token as soon as it is certain.
        is_interrupted: asked after each token; true ends the answer there.

    Raises:
        InputError: the prompt is empty or leaves no room for an answer.
    """
    stop_ids = list(model.base.stop_ids)
    result = model.generate(
        torch.tensor([list(ids)], device=model.device),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
        max_new_tokens=_room(model, len(ids), options.max_new_tokens),
        eos_token_id=stop_ids or None,
        pad_token_id=stop_ids[0] if stop_ids else 0,
        stopping_criteria=[lambda *_, **__: torch.full((1,), is_interrupted())],
        typical=options.typical,
        streamer=streamer,
        return_dict_in_generate=True,
        **_sampling(options),
    )
    assert isinstance(result, Generated)
    written: list[int] = result.sequences[0, len(ids) :].tolist()
    statistics = result.statistics
    reason: Literal["stop", "length", "interrupted"] = "length"
    if written[-1] in stop_ids:
        reason = "stop"
    elif is_interrupted():
        reason = "interrupted"
    text = model.tokenizer.decode(written, skip_special_tokens=True)
    assert isinstance(text, str)
    return Answer(
        text=text,
        num_tokens=statistics.num_tokens,
        finish_reason=reason,
        seconds=statistics.prefill_seconds + statistics.decode_seconds,
        prefill_seconds=statistics.prefill_seconds,
        acceptance_length=statistics.acceptance_length,
    )


def _sampling(options: AnswerOptions) -> dict[str, Any]:
    if options.temperature == 0:
        return dict(GREEDY)
    return {
        "do_sample": True,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
    }


def _room(model: MedusaModel, length: int, wanted: int) -> int:
    if not length:
        raise InputError("the prompt is empty; give some text")
    config = model.base.model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return wanted
    if length >= limit:
        raise InputError(
            f"the prompt has {length} tokens, but the base model has {limit} positions; shorten it"
        )
    return min(wanted, limit - length)
