"""Chat templates to ids and the exact mask."""

from __future__ import annotations

import pytest
import torch

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.examples import IGNORE, pad_batch, supervised_labels
from medusa_train.data.template import TemplateRefusedError
from medusa_train.errors import InputError
from tests.tokenizers_for_tests import (
    BOS,
    CHATML,
    CHATML_THINK,
    CHATML_TOOLS,
    END,
    EOS,
    LLAMA2,
    MISTRAL,
    PAD,
    PLAIN_ROLES,
    SPACE_AT_PROMPT,
    TEMPLATES,
    THINK_PROMPT,
    VICUNA,
    make_chat,
    make_tokenizer,
)

TWO_TURNS = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Teal is a colour."},
    {"role": "user", "content": "Name a metal."},
    {"role": "assistant", "content": "Zinc."},
]
WITH_SYSTEM = [{"role": "system", "content": "You are terse."}, *TWO_TURNS]


def supervised(chat: ChatTokenizer, row) -> list[str]:
    return [chat.tokenizer.decode(row.input_ids[s:e]) for s, e in row.assistant_spans]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", ["eos", "zero", "none", "own"])
def test_the_exact_mask_for_two_turns(side, pad):
    """BOS in the template and a tokenizer that adds one, padded to 64 with any pad id."""
    chat = make_chat(CHATML, pad={"eos": END, "zero": BOS, "none": None, "own": PAD}[pad])
    tokenizer = chat.tokenizer
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    [row] = chat.encode_conversation(TWO_TURNS)
    rendered = tokenizer.apply_chat_template(TWO_TURNS, tokenize=True)["input_ids"]
    assert list(row.input_ids) == rendered
    assert row.input_ids.count(tokenizer.bos_token_id) == 1
    assert supervised(chat, row) == ["Teal is a colour.<|im_end|>", "Zinc.<|im_end|>"]
    assert row.ended == (True, True)

    ids, attention = pad_batch([row.input_ids], pad_id=tokenizer.pad_token_id, side=side, length=64)
    first = 64 - len(rendered) if side == "left" else 0
    expected = torch.zeros(64, dtype=torch.int64)
    expected[first : first + len(rendered)] = 1
    assert torch.equal(attention[0], expected)
    assert ids[0][attention[0].bool()].tolist() == rendered

    labels = supervised_labels(row.input_ids, row.assistant_spans)
    kept = labels[labels != IGNORE]
    assert tokenizer.decode(kept) == "Teal is a colour.<|im_end|>Zinc.<|im_end|>"


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_those_of_apply_chat_template(name, metaspace):
    chat = make_chat(TEMPLATES[name], eos=EOS, metaspace=metaspace)
    ids = chat.encode_prompt(TWO_TURNS[:3])
    expected = chat.tokenizer.apply_chat_template(TWO_TURNS[:3], add_generation_prompt=True)
    assert ids == expected["input_ids"]
    for row in chat.encode_conversation(TWO_TURNS):
        start, _ = row.assistant_spans[-1]
        # What stands before an answer is the prompt that a server would have been sent.
        assert list(row.input_ids[:start]) == chat.encode_prompt(TWO_TURNS[: row.num_messages - 1])


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize(
    ("template", "eos", "answers"),
    [
        (CHATML, END, ["Teal is a colour.<|im_end|>", "Zinc.<|im_end|>"]),
        (LLAMA2, EOS, [" Teal is a colour. </s>", " Zinc. </s>"]),
        (MISTRAL, EOS, [" Teal is a colour.</s>", " Zinc.</s>"]),
        (VICUNA, EOS, [" Teal is a colour.</s>", " Zinc.</s>"]),
        (PLAIN_ROLES, EOS, ["Teal is a colour.", "Zinc."]),
    ],
)
def test_the_mask_covers_the_answers_and_nothing_else(template, eos, answers, metaspace):
    chat = make_chat(template, eos=eos, metaspace=metaspace)
    [row] = chat.encode_conversation(TWO_TURNS)
    found = supervised(chat, row)
    if metaspace:  # its decoder drops the first word's space
        found, answers = ([text.strip() for text in texts] for texts in (found, answers))
    assert found == answers
    assert row.ended == (template is not PLAIN_ROLES,) * 2
    assert not row.retokenised
    assert not chat.rewrites_history


def test_an_end_of_turn_that_is_no_stop_id_is_no_label():
    """ChatML whose model stops at another token: neither the marker nor what follows is learnt."""
    chat = make_chat(CHATML, eos=EOS)
    [row] = chat.encode_conversation(TWO_TURNS)
    assert supervised(chat, row) == ["Teal is a colour.", "Zinc."]
    assert row.ended == (False, False)


def test_a_stop_id_in_a_user_turn_ends_no_answer():
    """In ChatML the same token ends every turn; only the answer's own counts."""
    chat = make_chat(CHATML)
    [row] = chat.encode_conversation(TWO_TURNS)
    ends = [e - 1 for _, e in row.assistant_spans]
    assert [row.input_ids[e] for e in ends] == [chat.tokenizer.eos_token_id] * 2
    assert row.input_ids.count(chat.tokenizer.eos_token_id) == 4


def test_a_template_that_rewrites_history_gives_a_row_per_answer():
    chat = make_chat(CHATML_THINK)
    assert chat.rewrites_history
    turns = [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "<think>\nso\n</think>\n\nTeal."},
        {"role": "user", "content": "Name a metal."},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nZinc."},
    ]
    rows = chat.encode_conversation(turns)
    assert [supervised(chat, row) for row in rows] == [
        ["<think>\nso\n</think>\n\nTeal.<|im_end|>"],
        ["<think>\nwell\n</think>\n\nZinc.<|im_end|>"],
    ]
    assert [row.num_messages for row in rows] == [2, 4]
    apply = chat.tokenizer.apply_chat_template
    assert list(rows[0].input_ids) == apply(turns[:2])["input_ids"]
    assert list(rows[1].input_ids) == apply(turns)["input_ids"]
    assert "<think>\nso" not in chat.tokenizer.decode(rows[1].input_ids)


def test_a_template_that_strips_reasoning_keeps_rows_without_any_together():
    assert len(make_chat(CHATML_THINK).encode_conversation(TWO_TURNS)) == 1


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_token_across_the_border_is_tokenised_apart(metaspace):
    chat = make_chat(SPACE_AT_PROMPT, eos=EOS, metaspace=metaspace)
    rows = chat.encode_conversation(TWO_TURNS)
    assert [row.retokenised for row in rows] == [True, True]
    assert [supervised(chat, row) for row in rows] == [["Teal is a colour.</s>"], ["Zinc.</s>"]]


def test_a_generation_prompt_that_opens_a_reasoning_block():
    """The finished answer has no such block, so its reasoning is put behind the opened one."""
    chat = make_chat(THINK_PROMPT)
    answer = {"role": "assistant", "content": "<think>\nso\n</think>Teal."}
    [row] = chat.encode_conversation([TWO_TURNS[0], answer])
    assert row.retokenised
    assert chat.tokenizer.decode(row.input_ids).count("<think>") == 1
    assert supervised(chat, row) == ["so\n</think>Teal.<|im_end|>"]


@pytest.mark.parametrize("template", [MISTRAL])
def test_a_refused_system_turn_goes_to_the_first_user_turn_and_is_said_once(template, capsys):
    chat = make_chat(template, eos=EOS)
    user = {"role": "user", "content": "You are terse.\n\nName a colour."}
    for _ in range(2):
        [row] = chat.encode_conversation(WITH_SYSTEM)
        assert list(row.input_ids) == list(
            chat.encode_conversation([user, *TWO_TURNS[1:]])[0].input_ids
        )
        assert row.num_messages == 5
    assert capsys.readouterr().err.count("takes no system turn") == 1


def test_a_later_system_turn_is_refused_where_none_is_taken():
    chat = make_chat(MISTRAL, eos=EOS)
    turns = [*TWO_TURNS[:2], {"role": "system", "content": "Be kind."}, *TWO_TURNS[2:]]
    with pytest.raises(TemplateRefusedError, match="no system turn"):
        chat.encode_conversation(turns)


def test_what_a_template_raises_is_passed_on():
    turns = [TWO_TURNS[0], TWO_TURNS[0], TWO_TURNS[1]]
    with pytest.raises(TemplateRefusedError, match="roles must alternate"):
        make_chat(LLAMA2, eos=EOS).encode_conversation(turns)


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ],
}
TOOL_TURNS = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    CALL,
    {"role": "tool", "content": "4 C, rain"},
    {"role": "assistant", "content": "It is 4 degrees."},
]


def test_tool_calls_are_supervised_where_the_template_renders_them():
    chat = make_chat(CHATML_TOOLS)
    [row] = chat.encode_conversation(TOOL_TURNS)
    assert supervised(chat, row) == [
        '[call]{"name": "weather", "arguments": {"city": "Oslo"}}<|im_end|>',
        "It is 4 degrees.<|im_end|>",
    ]
    assert row.num_empty == 0


def test_a_call_that_the_template_leaves_out_is_no_lesson_in_saying_nothing():
    chat = make_chat(CHATML)
    [row] = chat.encode_conversation(TOOL_TURNS)
    assert supervised(chat, row) == ["It is 4 degrees.<|im_end|>"]
    assert row.num_empty == 1


def test_template_variables_reach_the_template():
    template = "{{ mood }}" + CHATML
    tokenizer = make_tokenizer()
    chat = ChatTokenizer(
        tokenizer, stop_ids=[4], chat_template=template, chat_template_kwargs={"mood": "blue"}
    )
    assert chat.tokenizer.decode(chat.encode_prompt(TWO_TURNS[:1])).startswith("blue")


def test_without_a_template_only_text_can_be_encoded():
    chat = make_chat(None)
    assert not chat.has_template
    assert chat.chat_template_hash is None
    with pytest.raises(InputError, match=r"no chat template; give one .*--chat-template"):
        chat.encode_prompt(TWO_TURNS[:1])
    row = chat.encode_text("Teal is a colour.")
    assert chat.tokenizer.decode(row.input_ids) == "<s>Teal is a colour."
    assert row.assistant_spans == ((1, len(row.input_ids)),)
    assert row.ended == (False,)


def test_plain_text_never_gets_a_second_bos():
    assert make_chat(None).encode_text("<s>Teal.").input_ids.count(0) == 1


def test_plain_text_without_bos_leaves_its_first_token_unsupervised():
    row = make_chat(None, adds_bos=False).encode_text("Teal is a colour.")
    assert row.input_ids[0] != 0
    assert row.assistant_spans == ((1, len(row.input_ids)),)
    assert make_chat(None, adds_bos=False).encode_text("a").assistant_spans == ()


@pytest.mark.parametrize(
    ("template", "eos", "header", "end", "end_text"),
    [
        (
            CHATML,
            END,
            "<s><|im_start|>user\n",
            "<|im_end|>\n<|im_start|>assistant\n",
            "<|im_end|>\n",
        ),
        (LLAMA2, EOS, "<s>[INST]", " [/INST]", " [/INST]"),
        # The space before the content belongs to its first word.
        (VICUNA, EOS, "<s>USER:", " ASSISTANT:", " ASSISTANT:"),
    ],
)
def test_the_parts_around_a_user_turn(template, eos, header, end, end_text):
    chat = make_chat(template, eos=eos)
    assert chat.tokenizer.decode(chat.user_header()) == header
    assert chat.tokenizer.decode(chat.user_end_ids) == end
    assert chat.user_end_text == end_text


def test_the_user_header_holds_the_system_turn():
    chat = make_chat(CHATML)
    header = chat.tokenizer.decode(chat.user_header([{"role": "system", "content": "Be terse."}]))
    assert header == "<s><|im_start|>system\nBe terse.<|im_end|>\n<|im_start|>user\n"


def test_the_user_header_of_a_later_turn_holds_the_turns_before():
    chat = make_chat(CHATML)
    history = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    header = chat.tokenizer.decode(chat.user_header(history))
    assert header.endswith("<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\n")


def test_a_syntax_error_names_its_line():
    with pytest.raises(InputError, match=r"chat template: line 2: "):
        make_chat("{{ bos_token }}\n{% for %}")


def test_the_hash_of_a_tokenizer_is_that_of_its_behaviour():
    chat = make_chat(CHATML)
    before = chat.tokenizer_hash
    other = make_chat(CHATML)
    other.tokenizer(["a", "b c d"], padding=True)
    assert other.tokenizer_hash == before
    assert make_chat(CHATML, metaspace=True).tokenizer_hash != before
    assert make_chat(LLAMA2).chat_template_hash != chat.chat_template_hash
