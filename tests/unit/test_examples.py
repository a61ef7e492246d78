"""Source positions, labels and padding."""

from __future__ import annotations

import pytest
import torch

from medusa_train.data.examples import IGNORE, pad_batch, supervised_labels, valid_pairs


def test_positions_and_labels_of_one_span():
    ids = [10, 11, 12, 13, 14, 15, 16]
    result = valid_pairs(ids, [(2, 6)], num_heads=3)
    assert result.positions.tolist() == [1, 2, 3, 4]
    assert result.labels.tolist() == [
        [13, 14, 15],
        [14, 15, IGNORE],
        [15, IGNORE, IGNORE],
        [IGNORE, IGNORE, IGNORE],
    ]
    assert result.spans.tolist() == [0, 0, 0, 0]
    assert result.trained().positions.tolist() == [1, 2, 3]


def test_no_target_lies_in_another_turn():
    result = valid_pairs(list(range(12)), [(2, 4), (4, 6), (8, 9)], num_heads=2)
    assert result.positions.tolist() == [1, 2, 3, 4, 7]
    assert result.spans.tolist() == [0, 0, 1, 1, 2]
    assert result.labels.tolist() == [
        [3, IGNORE],
        [IGNORE, IGNORE],
        [5, IGNORE],
        [IGNORE, IGNORE],
        [IGNORE, IGNORE],
    ]


def test_a_span_at_the_start_has_no_source_before_it():
    result = valid_pairs([5, 6, 7], [(0, 3)], num_heads=1)
    assert result.positions.tolist() == [0, 1]
    assert result.labels.tolist() == [[7], [IGNORE]]


@pytest.mark.parametrize("spans", [[], [(0, 1)]])
def test_nothing_to_learn_is_an_empty_result(spans):
    result = valid_pairs([5, 6], spans, num_heads=4)
    assert result.positions.shape == (0,)
    assert result.labels.shape == (0, 4)
    assert result.labels.dtype == torch.int64


def test_padding_is_by_length_whatever_the_pad_id():
    rows = [[1, 0], [0, 0, 2]]
    ids, attention = pad_batch(rows, pad_id=None, side="left")
    assert ids.tolist() == [[0, 1, 0], [0, 0, 2]]
    assert attention.tolist() == [[0, 1, 1], [1, 1, 1]]
    ids, attention = pad_batch(rows, pad_id=2, side="right", length=4)
    assert ids.tolist() == [[1, 0, 2, 2], [0, 0, 2, 2]]
    assert attention.tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
    with pytest.raises(ValueError, match="more than length 2"):
        pad_batch(rows, pad_id=0, length=2)


def test_labels_of_a_padded_row():
    labels = supervised_labels([4, 5, 6], [(1, 2)], length=5)
    assert labels.tolist() == [IGNORE, 5, IGNORE, IGNORE, IGNORE]
