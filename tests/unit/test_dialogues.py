"""Conversations of several turns: replayed, or written by the model, with the ids that it saw."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.base_model.load import BaseModel
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import Conversation, read_conversations
from medusa_train.distill.in_process import InProcessEngine
from medusa_train.distill.run import run_distill
from medusa_train.distill.sampling import Sampling
from medusa_train.distill.settings import DistillSettings, PromptSource
from medusa_train.distill.writer import Answer, Failure, Stopping, Teacher
from tests.distill_for_tests import distill, make_chat
from tests.models_for_tests import make_base
from tests.tokenizers_for_tests import CHATML, CHATML_THINK, MISTRAL, VICUNA, make_tokenizer

SETTINGS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "loop_ngram": 0}
QUESTIONS = ("Name a metal.", "Name a gas.", "Name a river.")


class ScriptedWriter:
    """Writes what a function of the prompt's text says; its ids are those of the text."""

    unit_size = 2
    num_workers = 1
    max_length: int | None = None
    teacher: Teacher | None = None

    def __init__(self, chat: ChatTokenizer, says: Callable[[str], str | Failure]) -> None:
        self.chat = chat
        self.says = says
        self.asked: list[str] = []

    def stop(self) -> None:
        pass

    def identity(self) -> dict[str, Any]:
        return {"writer": "scripted"}

    def write(self, prompts: Sequence[Sequence[int]], **_: Any) -> list[Answer | Failure]:
        answers: list[Answer | Failure] = []
        for prompt in prompts:
            text = self.chat.tokenizer.decode(list(prompt), skip_special_tokens=False)
            self.asked.append(text)
            said = self.says(text)
            if isinstance(said, Failure):
                answers.append(said)
                continue
            ids = self.chat.tokenizer(said, add_special_tokens=False)["input_ids"]
            answers.append(
                Answer(tuple(ids), "stop" if ids[-1] in self.chat.stop_ids else "length")
            )
        return answers


def _file(directory: Path, *questions: str, count: int = 1) -> tuple[PromptSource, ...]:
    path = directory / "chats.jsonl"
    rows = [
        {"turns": [questions[0] + " " * n + f"({n})" * (count > 1), *questions[1:]]}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (PromptSource("file", str(path)),)


def _scripted(
    directory: Path,
    template: str,
    says: Callable[[str], str | Failure],
    *,
    questions: Sequence[str] = QUESTIONS,
    eos: str = "<|im_end|>",
    **settings: Any,
) -> tuple[list[Conversation], ScriptedWriter, dict[str, Any]]:
    tokenizer = make_tokenizer(template=template, eos=eos)
    chat = ChatTokenizer(tokenizer, stop_ids=[tokenizer.convert_tokens_to_ids(eos)])
    writer = ScriptedWriter(chat, says)
    if "sources" not in settings:
        settings["sources"] = _file(directory, *questions)
    manifest = run_distill(
        writer,
        chat,
        base_model="scripted",
        base_fingerprint="0" * 16,
        settings=DistillSettings(**{**SETTINGS, "turns": 3, **settings}),
        output=directory / "out",
    )
    return read_conversations(directory / "out"), writer, manifest


@pytest.mark.parametrize("template", [CHATML, VICUNA, MISTRAL])
def test_the_model_saw_and_wrote_every_id_of_a_row(tmp_path: Path, template: str) -> None:
    """Greedy in float64: what follows each prompt is what the model writes after these ids."""
    base = make_base(template=template)
    base.model.double()
    settings = DistillSettings(
        **{**SETTINGS, "turns": 3, "sources": _file(tmp_path, *QUESTIONS, count=8)}
    )
    distill(base, settings=settings, output=tmp_path / "out")
    rows = read_conversations(tmp_path / "out")
    assert sum(len(row.assistant_spans) for row in rows) > 16
    assert any(len(row.assistant_spans) > 1 for row in rows)
    _check_greedy(base, rows)


def _check_greedy(base: BaseModel, rows: Sequence[Conversation]) -> None:
    engine = InProcessEngine(base.model, vocab_size=base.num_tokens, max_rows=1)
    for row in rows:
        for start, end in row.assistant_spans:
            [answer] = engine.generate(
                [row.input_ids[:start]],
                sampling=Sampling(0.0),
                stopping=Stopping(frozenset(base.stop_ids), 12),
                generator=torch.Generator(),
            )
            assert answer.token_ids == row.input_ids[start:end]


def test_a_replayed_conversation_is_one_row_of_the_template(tmp_path: Path) -> None:
    def says(text: str) -> str:
        return f"Answer {text.count('Name')}.<|im_end|>"

    rows, writer, manifest = _scripted(tmp_path, CHATML, says)
    [row] = rows
    assert [m["content"] for m in row.messages] == [
        "Name a metal.", "Answer 1.", "Name a gas.", "Answer 2.", "Name a river.", "Answer 3.",
    ]  # fmt: skip
    [encoded] = writer.chat.encode_conversation(row.messages)
    assert row.input_ids == encoded.input_ids[: len(row.input_ids)]
    assert row.assistant_spans == encoded.assistant_spans
    assert row.finish_reasons == ("stop", "stop", "stop")
    assert len(writer.asked) == 3
    assert manifest["num_shortened"] == {}


def test_answers_that_a_template_rewrites_are_rows_of_their_own(tmp_path: Path) -> None:
    """Case 13, for generated conversations."""

    said = "<think>\nso\n</think>\nTeal.<|im_end|>"
    rows, writer, _ = _scripted(tmp_path, CHATML_THINK, lambda _: said)
    assert len(rows) == 3
    assert len({row.id for row in rows}) == 3
    for number, row in enumerate(rows, start=1):
        [(start, end)] = row.assistant_spans
        assert list(row.input_ids[:start]) == writer.chat.encode_prompt(row.messages[:-1])
        text = writer.chat.tokenizer.decode(row.input_ids[start:end])
        assert text == said
        assert sum(message["role"] == "user" for message in row.messages) == number


def test_turns_limit_what_is_replayed(tmp_path: Path) -> None:
    rows, writer, _ = _scripted(tmp_path, CHATML, lambda _: "So.<|im_end|>", turns=2)
    assert len(writer.asked) == 2
    assert len(rows[0].messages) == 4


def test_a_conversation_that_goes_wrong_is_kept_as_far_as_it_came(tmp_path: Path) -> None:
    def says(text: str) -> str:
        return "<|im_end|>" if "gas" in text else "Zinc.<|im_end|>"

    rows, _, manifest = _scripted(tmp_path, CHATML, says)
    assert [m["content"] for m in rows[0].messages] == ["Name a metal.", "Zinc."]
    assert manifest["num_shortened"] == {"empty answer": 1}
    assert manifest["num_dropped"] == {}


def test_a_cut_answer_gets_no_end_of_turn_label(tmp_path: Path) -> None:
    rows, writer, _ = _scripted(tmp_path, CHATML, lambda _: "Zinc is", turns=2)
    [row] = rows
    assert row.finish_reasons == ("length", "length")
    for start, end in row.assistant_spans:
        assert not set(row.input_ids[start:end]) & writer.chat.stop_ids
    # The template closes the turn in the history of the next one, unsupervised.
    assert row.input_ids[row.assistant_spans[0][1]] in writer.chat.stop_ids


def test_a_model_writes_the_user_turns_that_a_file_does_not_have(tmp_path: Path) -> None:
    def says(text: str) -> str:
        if text.endswith("<|im_start|>user\n"):
            return "And another?<|im_end|>"
        return f"Answer {text.count('<|im_start|>user')}.<|im_end|>"

    rows, _, _ = _scripted(tmp_path, CHATML, says, questions=QUESTIONS[:1], write_user_turns=True)
    [row] = rows
    assert [m["content"] for m in row.messages] == [
        "Name a metal.", "Answer 1.", "And another?", "Answer 2.", "And another?", "Answer 3.",
    ]  # fmt: skip
    assert len(row.assistant_spans) == 3


def test_a_model_that_writes_the_first_turn_writes_the_later_ones(tmp_path: Path) -> None:
    def says(text: str) -> str:
        turn = text.count("<|im_start|>user")
        return f"{'Question' if text.endswith('user' + chr(10)) else 'Answer'} {turn}.<|im_end|>"

    rows, _, manifest = _scripted(
        tmp_path, CHATML, says, sources=(PromptSource("model"),), num_prompts=1, turns=2
    )
    [row] = rows
    assert [m["content"] for m in row.messages] == [
        "Question 1.", "Answer 1.", "Question 2.", "Answer 2.",
    ]  # fmt: skip
    assert manifest["prompts_of_the_model"] == {"drawn": 1, "usable": 1}


def test_a_system_turn_that_the_template_refuses_is_folded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, writer, _ = _scripted(
        tmp_path, MISTRAL, lambda _: " Zinc.</s>", eos="</s>", system_prompt="Be terse.", turns=2
    )
    assert writer.asked[0].startswith("<s>[INST] Be terse.\n\nName a metal. [/INST]")
    roles = [message["role"] for message in rows[0].messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert capsys.readouterr().err.count("takes no system turn") == 1


def test_template_options_are_recorded_and_used(tmp_path: Path) -> None:
    template = CHATML.replace("{{ '<|im_start|>assistant\n' }}", (
        "{{ '<|im_start|>assistant\n' }}{% if not enable_thinking %}"
        "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    ))  # fmt: skip
    base = make_base(template=template)
    settings = DistillSettings(**{**SETTINGS, "sources": _file(tmp_path, "Name a metal.")})
    kwargs = {"enable_thinking": False}
    manifest = distill(
        base, settings=settings, output=tmp_path / "out", chat_template_kwargs=kwargs
    )
    assert manifest["chat_template_kwargs"] == kwargs
    [row] = read_conversations(tmp_path / "out")
    chat = make_chat(base, chat_template_kwargs=kwargs)
    assert list(row.input_ids[: row.assistant_spans[0][0]]) == chat.encode_prompt(row.messages[:1])


def test_failed_prompts_are_listed_and_asked_again(tmp_path: Path) -> None:
    from medusa_train.errors import MedusaTrainError

    down = True

    def says(text: str) -> str | Failure:
        if down and "(1)" in text:
            return Failure("server error", "500")
        return "Zinc.<|im_end|>"

    sources = _file(tmp_path, "Name a metal.", count=4)
    with pytest.raises(MedusaTrainError, match=r"1 of 4 prompts have no answer.*again"):
        _scripted(tmp_path, CHATML, says, sources=sources, turns=1)
    rows = read_conversations(tmp_path / "out")
    assert len(rows) == 3
    failure = json.loads((tmp_path / "out/failures.jsonl").read_text())
    assert failure == {"index": 1, "source": "chats.jsonl", "reason": "server error",
                       "detail": "500"}  # fmt: skip
    down = False
    rows, writer, manifest = _scripted(tmp_path, CHATML, says, sources=sources, turns=1)
    assert len(rows) == 4
    # Its unit, two prompts, is asked again and nothing else.
    assert len(writer.asked) == 2
    assert manifest["num_failed"] == {}
    assert not (tmp_path / "out/failures.jsonl").exists()
    assert not (tmp_path / "out/generation").exists()


def test_tools_of_a_prompt_are_shown_to_the_model(tmp_path: Path) -> None:
    template = "{{ tools | tojson if tools else 'none' }}" + CHATML
    path = tmp_path / "tools.jsonl"
    turn = {"role": "user", "content": "Is it raining?"}
    rows = [{"messages": [turn], "tools": [{"name": "weather"}]}, {"prompt": "Name a metal."}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, writer, _ = _scripted(
        tmp_path,
        template,
        lambda _: "Zinc.<|im_end|>",
        sources=(PromptSource("file", str(path)),),
        write_user_turns=True,
        turns=2,
    )
    begins = [text.partition("<s>")[0] for text in writer.asked]
    assert begins == ['[{"name": "weather"}]', "none"] * 3
    decode = writer.chat.tokenizer.decode
    shown = [str(decode(list(row.input_ids))).partition("<s>")[0] for row in found]
    assert shown == begins[:2]


def test_the_first_refusal_of_a_template_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "{% if 'metal' in messages[0].content %}{{ raise_exception('no metals') }}{% endif %}"
    )
    _, _, manifest = _scripted(
        tmp_path,
        template + CHATML,
        lambda _: "Zinc.<|im_end|>",
        sources=(
            *_file(tmp_path, "Name a metal.", count=3),
            PromptSource("demo", limit=1),
        ),
        turns=1,
    )
    assert manifest["num_dropped"] == {"prompt refused by the chat template": 3}
    said = "warning: a prompt is refused by the chat template: no metals; further ones are counted"
    assert capsys.readouterr().err.count(said) == 1
