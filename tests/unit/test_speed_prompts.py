from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from medusa_train.data.report import Tally
from medusa_train.speed.prompts import file_prompts, first_prompts
from tests.tokenizers_for_tests import make_chat
from tests.training_for_tests import conversation


def test_prompts_of_a_file_know_their_question(tmp_path: Path) -> None:
    rows = [
        {"category": "writing", "turns": ["Name a metal.", "And then?"]},
        {"messages": [{"role": "system", "content": "Be brief."},
                      {"role": "user", "content": "the sea"}]},
        {"text": "the rain"},
    ]  # fmt: skip
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = [prompt for _, prompt in file_prompts(path, make_chat(), Tally())]
    assert [(prompt.category, prompt.question) for prompt in prompts] == [
        ("writing", "Name a metal."),
        (None, "the sea"),
        (None, "the rain"),
    ]


def test_prompts_of_conversations_know_their_question() -> None:
    asked = conversation([5, 6, 7, 8, 9], [(3, 5)], name="what is it")
    answer = {"role": "assistant", "content": "so"}
    later = {"role": "user", "content": "and then"}
    whole = replace(asked, messages=(*asked.messages, answer))
    two = replace(
        asked,
        messages=(*asked.messages, answer, later, answer),
        assistant_spans=((1, 2), (3, 5)),
        finish_reasons=("given", "given"),
    )
    text = replace(asked, messages=(), assistant_spans=((0, 5),))
    none = replace(asked, messages=(), assistant_spans=(), finish_reasons=())
    found = [prompt for _, prompt in first_prompts([whole, two, text, none])]
    assert [(prompt.ids, prompt.question) for prompt in found] == [
        ((5, 6, 7), "what is it"),
        ((5,), "what is it"),
    ]
