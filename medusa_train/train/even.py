"""Whole batches for every process, without a row that counts twice.

Where the last batch of an epoch is not enough for all processes, samplers fill it with rows that
were seen already. Here it is filled with empty ones, which have no pair and no weight in the loss.
"""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import Dataset

from medusa_train.hidden_states.cache import CachedExamples
from medusa_train.hidden_states.online import OnlineExamples

Examples = CachedExamples | OnlineExamples


class EvenExamples(Dataset[dict[str, Tensor]]):
    """``examples`` and then empty ones, ``length`` in all.

    Args:
        examples: one item per conversation; at least one.
        length: of this data set.
    """

    def __init__(self, examples: Examples, *, length: int) -> None:
        self.examples = examples
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index < len(self.examples):
            return self.examples[index]
        # No position and no label. A base model still runs on the row, which must have a token.
        first = self.examples[0]
        return {name: value[: name == "input_ids"] for name, value in first.items()}


def even_examples(
    examples: Examples, *, batch_size: int, num_processes: int
) -> Examples | EvenExamples:
    """``examples``, with as many empty ones as make every batch of every process whole.

    Args:
        examples: one item per conversation.
        batch_size: of one process.
        num_processes: that share each step; 1 needs nothing.
    """
    step = batch_size * num_processes
    length = -(-len(examples) // step) * step
    if num_processes == 1 or length == len(examples):
        return examples
    return EvenExamples(examples, length=length)
