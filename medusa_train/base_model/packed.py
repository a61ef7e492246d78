"""Does a model read conversations that are packed into one row as if each were alone?

transformers find the borders where position ids restart, and mask attention there, in most models.
One that carries a state from token to token (a state-space or recurrent one) has no such mask.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from medusa_train.base_model.features import hidden_states, is_close, output_projection
from medusa_train.errors import InputError

_PROBE = (5, 3, 7)
"""Lengths of the rows that are tried."""


@torch.no_grad()
def check_packed_rows(model: PreTrainedModel) -> None:
    """Compare the states of a few short rows, one at a time and packed.

    Raises:
        InputError: they differ; the model is named.
    """
    num_tokens = output_projection(model)[0].shape[0]
    ids = torch.arange(sum(_PROBE), device=model.device) * 7 % num_tokens
    rows = ids.split(list(_PROBE))
    positions = torch.cat([torch.arange(length, device=model.device) for length in _PROBE])
    was_training = model.training
    model.eval()
    try:
        alone = torch.cat([hidden_states(model, row[None])[0] for row in rows])
        packed = hidden_states(model, ids[None], position_ids=positions[None])[0]
    except TypeError as error:
        raise InputError(_refusal(model, "takes no position ids")) from error
    finally:
        model.train(was_training)
    if not is_close(packed, alone):
        raise InputError(_refusal(model, "reads across the border of packed conversations"))


def _refusal(model: PreTrainedModel, why: str) -> str:
    return f"data.packing: {type(model).__name__} {why}; set it to false"
