"""Laws: packing loses and repeats nothing, and no valid pair crosses a border."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.data.packing import first_fit_decreasing, pack_rows
from medusa_train.hidden_states.online import OnlineExamples, collate_online, collate_packed
from medusa_train.losses import IGNORE, label_offset
from tests.reference import packing_reference
from tests.training_for_tests import conversation

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=9)


@given(LENGTHS, st.integers(1, 30))
def test_packs_are_those_of_the_definition(lengths: list[int], capacity: int) -> None:
    packs = first_fit_decreasing(lengths, capacity=capacity)
    assert packs == packing_reference.first_fit_decreasing(lengths, capacity)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or sum(lengths[i] for i in pack) <= capacity


@given(LENGTHS, st.integers(1, 30))
def test_every_token_is_in_exactly_one_place(lengths: list[int], capacity: int) -> None:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    # Every token of all conversations has a number of its own; padding has none.
    rows = [list(range(end - n + 1, end + 1)) for end, n in zip(ends, lengths, strict=True)]
    packed = pack_rows(rows, capacity=capacity)
    tokens, positions = packed.input_ids.flatten(), packed.position_ids.flatten()
    assert sorted(tokens[tokens > 0].tolist()) == list(range(1, ends[-1] + 1))
    for row, start in zip(rows, packed.starts.tolist(), strict=True):
        assert tokens[start : start + len(row)].tolist() == row
        assert positions[start : start + len(row)].tolist() == list(range(len(row)))
        # A conversation does not go on in the next row.
        assert start % packed.input_ids.shape[1] + len(row) <= packed.input_ids.shape[1]


@st.composite
def conversations(draw: st.DrawFn):
    rows = []
    for number in range(draw(st.integers(1, 6))):
        length = draw(st.integers(2, 12))
        start = draw(st.integers(0, length - 1))
        spans = [(start, draw(st.integers(start + 1, length)))]
        ids = [100 * number + position for position in range(length)]
        rows.append(conversation(ids, spans, name=str(number)))
    return rows


@given(conversations(), st.integers(1, 30), st.integers(1, 4), st.booleans())
def test_no_valid_pair_crosses_a_conversation(
    rows: list, capacity: int, num_heads: int, with_last: bool
) -> None:
    examples = OnlineExamples(rows, num_heads=num_heads, with_last=with_last)
    items = [examples[i] for i in range(len(rows))]
    batch = collate_packed(items, capacity=capacity)
    assert torch.equal(batch["labels"], collate_online(items)["labels"])
    sources = batch["input_ids"].flatten()[batch["source_index"]]
    for source, labels in zip(sources.tolist(), batch["labels"].tolist(), strict=True):
        for head, label in enumerate(labels):
            # An id is 100 times its conversation plus its place there.
            assert label in {IGNORE, source + label_offset(head)}
