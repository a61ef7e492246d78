"""Laws: the mask is exactly the assistant's tokens, and no valid pair crosses a turn."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from medusa_train.data.conversations import Conversation, split_of, truncate
from medusa_train.data.examples import IGNORE, pad_batch, valid_pairs
from medusa_train.data.prefixes import PrefixTokenizer
from tests.reference.pairs_reference import pairs, speakers, walked_positions
from tests.tokenizers_for_tests import CHATML, CHATML_THINK, EOS, LLAMA2, make_chat

# Words, so that nothing that a template strips stands at the ends.
WORDS = st.lists(
    st.text("abcdefgh Teal.?7é", min_size=1, max_size=12).filter(str.strip), min_size=1, max_size=3
).map(lambda words: " ".join(" ".join(words).split()))
TURNS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4)
CHATS = {"chatml": make_chat(CHATML), "think": make_chat(CHATML_THINK)}
LLAMA = make_chat(LLAMA2, eos=EOS)
PREFIX_CHATS = {
    "bytes": make_chat(CHATML),
    "metaspace": make_chat(CHATML, metaspace=True),
    "greedy": make_chat(CHATML),
}
# One that takes the white space behind it, and one that holds another.
PREFIX_CHATS["greedy"].tokenizer.add_tokens(
    [
        AddedToken("<|im_end|>\n", normalized=False),
        AddedToken("is a", rstrip=True, normalized=False),
    ]
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]]]:
    length = draw(st.integers(1, 24))
    cuts = sorted(draw(st.sets(st.integers(0, length), max_size=8)))
    spans = [span for span in pairwise(cuts) if draw(st.booleans())]
    return draw(st.lists(st.integers(0, 50), min_size=length, max_size=length)), spans


def messages_of(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


@settings(deadline=None)
@given(turns=TURNS, name=st.sampled_from(sorted(CHATS)))
def test_the_mask_covers_exactly_the_assistants_tokens(turns, name):
    """In ChatML every piece is tokenised by itself, since special tokens stand between them."""
    chat = CHATS[name]
    pieces = [("prompt", "<s>")]
    for user, answer in turns:
        prompt = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        pieces += [("prompt", prompt), ("answer", answer), ("prompt", "\n")]
    end_id = chat.tokenizer.eos_token_id
    ids, mask = speakers(
        pieces,
        end_id=end_id,
        encode=lambda text: chat.tokenizer(text, add_special_tokens=False)["input_ids"],
    )
    [row] = chat.encode_conversation(messages_of(turns))
    found = [False] * len(row.input_ids)
    for start, end in row.assistant_spans:
        found[start:end] = [True] * (end - start)
    # Piece by piece a newline may be tokenised differently from one that the next piece follows.
    assert chat.tokenizer.decode(row.input_ids) == chat.tokenizer.decode(ids)
    answers = [token for token, spoken in zip(ids, mask, strict=True) if spoken]
    assert [t for t, spoken in zip(row.input_ids, found, strict=True) if spoken] == answers


@settings(deadline=None)
@given(turns=TURNS)
def test_every_answer_follows_the_prompt_that_a_server_would_get(turns):
    messages = messages_of(turns)
    for row in LLAMA.encode_conversation(messages):
        for number, (start, end) in enumerate(row.assistant_spans):
            if len(row.assistant_spans) == len(turns):
                prompt = LLAMA.encode_prompt(messages[: 2 * number + 1])
                assert list(row.input_ids[:start]) == prompt
            assert row.input_ids[end - 1] in LLAMA.stop_ids
            assert LLAMA.stop_ids.isdisjoint(row.input_ids[start : end - 1])


@given(row=rows(), num_heads=st.integers(1, 5))
def test_pairs_are_those_of_the_definition(row, num_heads):
    ids, spans = row
    result = valid_pairs(ids, spans, num_heads=num_heads)
    found = [
        (span, t, k, label)
        for span, t, labels in zip(
            result.spans.tolist(), result.positions.tolist(), result.labels.tolist(), strict=True
        )
        for k, label in enumerate(labels)
        if label != IGNORE
    ]
    assert found == pairs(ids, spans, num_heads)
    walked = list(zip(result.spans.tolist(), result.positions.tolist(), strict=True))
    assert walked == walked_positions(spans)


@given(row=rows(), num_heads=st.integers(1, 5))
def test_no_valid_pair_crosses_a_turn(row, num_heads):
    ids, spans = row
    result = valid_pairs(range(len(ids)), spans, num_heads=num_heads)
    for span, t, targets in zip(
        result.spans.tolist(), result.positions.tolist(), result.labels.tolist(), strict=True
    ):
        start, end = spans[span]
        assert start - 1 <= t < end
        assert all(start < target < end for target in targets if target != IGNORE)


@given(row=rows(), max_length=st.integers(1, 30))
def test_truncation_keeps_a_prefix_and_invents_nothing(row, max_length):
    ids, spans = row
    whole = Conversation("x", "s", (), tuple(ids), tuple(spans), ("given",) * len(spans))
    cut = truncate(whole, max_length)
    expected = {t for start, end in spans for t in range(start, end) if t < max_length}
    if cut is None:
        assert not expected
        return
    assert cut.input_ids == tuple(ids[:max_length])
    assert {t for start, end in cut.assistant_spans for t in range(start, end)} == expected
    for (_, end), reason, (_, old_end) in zip(
        cut.assistant_spans, cut.finish_reasons, spans, strict=False
    ):
        assert reason == ("given" if end == old_end else "length")


@given(
    batch=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=4),
    pad_id=st.sampled_from([None, 0, 3]),
    side=st.sampled_from(["left", "right"]),
)
def test_the_attention_mask_picks_out_the_rows(batch, pad_id, side):
    ids, attention = pad_batch(batch, pad_id=pad_id, side=side)
    for row, row_ids, row_mask in zip(batch, ids, attention, strict=True):
        assert row_ids[row_mask.bool()].tolist() == row
        real = torch.nonzero(row_mask).flatten().tolist()
        assert real == list(range(len(row))) if side == "right" else len(real) == len(row)


@given(text=st.text(max_size=20), answers=st.lists(st.text(max_size=5), min_size=2, max_size=3))
def test_answers_to_one_prompt_never_straddle_the_split(text, answers):
    sides = set()
    for number, answer in enumerate(answers):
        # The same question with other spacing and case is the same prompt.
        asked = f"  {text.upper() if text.upper().casefold() == text.casefold() else text} "
        messages = (
            {"role": "user", "content": asked if number else text},
            {"role": "assistant", "content": answer},
        )
        row = Conversation(str(number), "s", messages, (number, 1), ((1, 2),), ("given",))
        sides.add(split_of(row, eval_fraction=0.5))
    assert len(sides) == 1


@settings(deadline=None)
@given(
    pieces=st.lists(
        st.sampled_from(["<|im_start|>", "<|im_end|>", "</s>", "\n", " ", "Teal", "is a", "<|im_"]),
        min_size=1,
        max_size=12,
    ),
    name=st.sampled_from(sorted(PREFIX_CHATS)),
    data=st.data(),
)
def test_ids_of_beginnings_are_those_of_the_tokenizer(pieces, name, data):
    chat, whole = PREFIX_CHATS[name], "".join(pieces)
    prefix = whole[: data.draw(st.integers(0, len(whole)))]

    def tokenise(texts: list[str]) -> list[list[int]]:
        return chat.tokenizer(texts, add_special_tokens=False)["input_ids"]

    whole_ids, expected = tokenise([whole, prefix])
    tokenizer = PrefixTokenizer(chat.tokenizer, tokenise)
    [found] = tokenizer.ids_of([prefix], whole=whole, whole_ids=whole_ids)
    assert found in (None, expected)
    [other] = tokenizer.ids_of(["x" + whole], whole=whole, whole_ids=whole_ids)
    assert other is None
