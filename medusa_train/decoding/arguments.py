"""The arguments of ``generate``: what means nothing, and what does not go with heads, is refused.

Shapes: B rows, P columns of the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.configuration_utils import GenerationMode

from medusa_train.decoding.acceptance import Typical
from medusa_train.errors import ArgumentError, InputError

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_CACHES = (None, "dynamic", "offloaded")
_ID_TYPES = (torch.int64, torch.int32)


def check_arguments(
    *, typical: object, generation_config: object, streamer: object, stopping_criteria: object
) -> None:
    """Refuse values of other types, with which the library would fail somewhere inside.

    Raises:
        ArgumentError: it names the argument.
    """
    if typical is not None and not isinstance(typical, Typical):
        raise ArgumentError(f"typical: must be Typical(epsilon, delta), got {typical!r}")
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise ArgumentError(
            f"generation_config: must be a GenerationConfig, got {generation_config!r}"
        )
    if streamer is not None and not callable(getattr(streamer, "put", None)):
        raise ArgumentError(f"streamer: must have put and end, got {streamer!r}")
    if stopping_criteria is not None and not isinstance(stopping_criteria, list | tuple):
        raise ArgumentError(
            f"stopping_criteria: must be a list of criteria, got {stopping_criteria!r}"
        )


def check_prompts(
    inputs: object, options: Mapping[str, Any], *, num_embeddings: int | None
) -> None:
    """Refuse prompts that the model cannot read.

    Args:
        inputs: the prompts, or None where they are ``input_ids`` of the options.
        options: the other arguments.
        num_embeddings: rows of the model's input embeddings, None where that is not known.

    Raises:
        ArgumentError: no tensor [B, P] of token ids, no ids, ids that the model does not have, or a
            mask of another shape.
    """
    ids = options.get("input_ids") if inputs is None else inputs
    if ids is None:
        # The library begins with the BOS token, or says that there is none.
        return
    if not isinstance(ids, Tensor):
        raise ArgumentError(
            f"input_ids: must be a tensor [B, P] of token ids, got {type(ids).__name__}; give "
            "return_tensors='pt' to the tokenizer, and **inputs to generate"
        )
    if ids.dim() != 2 or ids.dtype not in _ID_TYPES:
        kind = str(ids.dtype).removeprefix("torch.")
        raise ArgumentError(
            f"input_ids: must be a tensor [B, P] of token ids, got {kind} of shape "
            f"{list(ids.shape)}"
        )
    if not ids.numel():
        raise ArgumentError(f"input_ids: has no tokens: its shape is {list(ids.shape)}")
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or (num_embeddings is not None and highest >= num_embeddings):
        wrong = lowest if lowest < 0 else highest
        known = "" if num_embeddings is None else f", which has {num_embeddings:,}"
        raise ArgumentError(f"input_ids: {wrong} is no token id of the base model{known}")
    mask = options.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == ids.shape):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ArgumentError(
            f"attention_mask: must be a tensor of the shape of input_ids, {list(ids.shape)}, got "
            f"{got}"
        )


@contextmanager
def refusals(*, has_begun: Callable[[], bool]) -> Iterator[None]:
    """Say as our own error what the library refuses before anything is written.

    Args:
        has_begun: whether decoding runs already; then an error is no matter of arguments.

    Raises:
        ArgumentError: with the library's words.
    """
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        if has_begun():
            raise
        text = " ".join(str(error).split())
        raise ArgumentError(f"generate: {text}") from error


def check_options(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse what this loop would have to leave out.

    Raises:
        ArgumentError: it names the option.
    """
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise ArgumentError(
            f"{mode.value}: does not go with heads; use greedy decoding or sampling"
        )
    if config.cache_implementation not in _CACHES:
        raise ArgumentError(
            f"cache_implementation: {config.cache_implementation!r} cannot be rolled back to an "
            "accepted token; leave it out"
        )
    if config.return_dict_in_generate:
        for name in _NOT_RETURNED:
            if getattr(config, name, None):
                raise ArgumentError(f"{name}: is not there when decoding with heads; leave it out")
    cache = model_kwargs.get("cache")
    if cache is not None and cache.get_seq_length():
        raise ArgumentError("cache: decoding with heads begins with an empty one; leave it out")
    known = {"attention_mask", "position_ids", "logits_to_keep", "use_cache", "cache"}
    unknown = sorted(name for name in model_kwargs.keys() - known if model_kwargs[name] is not None)
    if unknown:
        raise ArgumentError(
            f"{', '.join(unknown)}: decoding with heads takes input_ids and attention_mask alone"
        )


def left_padding(
    input_ids: Tensor, model_kwargs: Mapping[str, Any]
) -> tuple[Tensor | None, Tensor]:
    """The attention mask of the prompts, and [B] how many columns of padding each begins with.

    Raises:
        ArgumentError: padding elsewhere, or positions of the caller's own.
    """
    num_rows, length = input_ids.shape
    mask: Tensor | None = model_kwargs.get("attention_mask")
    starts = torch.zeros(num_rows, dtype=torch.long, device=input_ids.device)
    if mask is not None:
        starts = (mask == 0).sum(dim=1)
        columns = torch.arange(length, device=mask.device)
        if not torch.equal(mask != 0, columns >= starts[:, None]) or int(starts.max()) == length:
            raise ArgumentError(
                "attention_mask: prompts must be padded on the left alone "
                "(tokenizer.padding_side = 'left') and have a token each"
            )
    positions: Tensor = model_kwargs["position_ids"]
    if positions.dim() != 2 or not bool((positions[:, -1] + 1 == length - starts).all()):
        raise ArgumentError("position_ids: must count each row's tokens from 0; leave them out")
    return mask, starts
