"""Conversations that a user names for a measurement: a data set, or a file of any known format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from medusa_train.console import warn
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import (
    CONVERSATIONS_FILE,
    Conversation,
    check_token_ids,
    is_dataset,
    read_conversations,
)
from medusa_train.data.sources import load_conversations_file, truncate_rows


def given_conversations(
    data: Path, *, chat: Callable[[], ChatTokenizer], num_tokens: int, max_length: int | None
) -> Sequence[Conversation]:
    """Read, check and cut conversations; what is dropped or repaired is said.

    Args:
        data: a data set directory, or a ShareGPT, messages or text file.
        chat: gives what encodes chats in a file; a data set has its ids.
        num_tokens: of the base's tokenizer.
        max_length: longest conversation in tokens; None cuts nothing.

    Raises:
        InputError: no such file or directory, or rows that are none.
    """
    if is_dataset(data):
        path = data / CONVERSATIONS_FILE
        rows = read_conversations(data)
    else:
        path = data
        rows, report = load_conversations_file(data, chat())
        for line in report.location_lines():
            warn(line)
    check_token_ids(rows, vocab_size=num_tokens, path=path)
    if max_length is None:
        return rows
    kept, cut = truncate_rows(rows, max_length=max_length, directory=data)
    for line in cut.location_lines():
        warn(line)
    return kept
