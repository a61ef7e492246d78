from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.base_model.load import BaseModel
from medusa_train.data.conversations import read_conversations, read_manifest
from medusa_train.distill import filters
from medusa_train.distill.duplicates import EXACT_DUPLICATE
from medusa_train.distill.in_process import InProcessEngine
from medusa_train.distill.sampling import Sampler, Sampling
from medusa_train.distill.settings import DistillSettings, PromptSource
from medusa_train.distill.user_turns import UserTurns
from medusa_train.distill.writer import Answer, Stopping
from medusa_train.errors import InputError, MedusaTrainError
from tests.distill_for_tests import distill, make_chat
from tests.models_for_tests import ARCHITECTURES, make_base, make_model
from tests.tokenizers_for_tests import END, VICUNA, make_tokenizer

SETTINGS: dict[str, Any] = {
    "num_prompts": 20,
    "max_prompt_tokens": 60,
    "max_new_tokens": 12,
    "temperature": 1.0,
    "loop_ngram": 0,
}


def _prompts_file(directory: Path, count: int = 20) -> tuple[PromptSource, ...]:
    path = directory / "prompts.txt"
    path.write_text("".join(f"Name a colour, {n} of them.\n" for n in range(count)))
    return (PromptSource("file", str(path)),)


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return make_base()


def test_rows_are_what_the_model_saw_and_wrote(base: BaseModel, tmp_path: Path) -> None:
    chat = make_chat(base)
    settings = DistillSettings(**{**SETTINGS, "sources": _prompts_file(tmp_path)})
    manifest = distill(base, settings=settings, output=tmp_path / "out")
    rows = read_conversations(tmp_path / "out")
    assert len(rows) == manifest["num_conversations"]
    assert len({row.id for row in rows}) == len(rows)
    dropped = sum(manifest["num_dropped"].values())
    assert len(rows) + dropped == 20
    for row in rows:
        prompt = chat.encode_prompt(row.messages[:-1])
        [(start, end)] = row.assistant_spans
        assert list(row.input_ids[:start]) == prompt
        assert end == len(row.input_ids)
        stopped = row.input_ids[-1] in chat.stop_ids
        assert row.finish_reasons == ("stop" if stopped else "length",)
        assert not set(row.input_ids[start : end - 1]) & chat.stop_ids
        assert stopped or end - start == 12
    assert not (tmp_path / "out" / "generation").exists()


def test_two_runs_give_the_same_bytes_and_a_seed_changes_them(
    base: BaseModel, tmp_path: Path
) -> None:
    texts = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        settings = DistillSettings(**SETTINGS, seed=seed, sources=_prompts_file(tmp_path))
        distill(base, settings=settings, output=tmp_path / name)
        texts.append((tmp_path / name / "conversations.jsonl").read_bytes())
    assert texts[0] == texts[1] != texts[2]


def test_finished_data_are_not_made_again(base: BaseModel, tmp_path: Path) -> None:
    settings = DistillSettings(**SETTINGS, sources=_prompts_file(tmp_path))
    distill(base, settings=settings, output=tmp_path / "out")
    path = tmp_path / "out" / "conversations.jsonl"
    before = path.stat().st_mtime_ns
    distill(base, settings=settings, output=tmp_path / "out")
    assert path.stat().st_mtime_ns == before
    other = DistillSettings(**{**SETTINGS, "temperature": 0.5}, sources=settings.sources)
    with pytest.raises(InputError, match=r"holds another generation \(temperature 1.0 → 0.5\)"):
        distill(base, settings=other, output=tmp_path / "out")


def test_another_tokenizer_or_end_is_another_generation(base: BaseModel, tmp_path: Path) -> None:
    settings = DistillSettings(**SETTINGS, sources=_prompts_file(tmp_path))
    distill(base, settings=settings, output=tmp_path / "out")
    ends = replace(base, stop_ids=(1, *base.stop_ids))
    with pytest.raises(InputError, match=r"holds another generation \(stop_ids \[4\] → \[1, 4\]"):
        distill(ends, settings=settings, output=tmp_path / "out")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["metal"])
    with pytest.raises(InputError, match=r"holds another generation \(tokenizer_hash "):
        distill(replace(base, tokenizer=tokenizer), settings=settings, output=tmp_path / "out")


class _Interrupted(Exception):
    """Stands in for a kill: nothing catches it."""


@pytest.mark.parametrize("steps", [1, 9, 14, 25])
def test_an_interrupted_run_gives_the_same_bytes(
    base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    settings = DistillSettings(**SETTINGS, sources=_prompts_file(tmp_path))
    distill(base, settings=settings, output=tmp_path / "straight")
    forward, calls = InProcessEngine.generate, 0

    def stopping_after(self: InProcessEngine, *args: Any, on_step: Any, **kwargs: Any) -> Any:
        def count(tokens: int) -> None:
            nonlocal calls
            calls += 1
            if calls == steps:
                raise _Interrupted
            on_step(tokens)

        return forward(self, *args, on_step=count, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(InProcessEngine, "generate", stopping_after)
        with pytest.raises(_Interrupted):
            distill(base, settings=settings, output=tmp_path / "cut")
    distill(base, settings=settings, output=tmp_path / "cut")
    straight, cut = (
        (tmp_path / name / "conversations.jsonl").read_bytes() for name in ("straight", "cut")
    )
    assert straight == cut


def test_a_model_that_writes_no_prompts_is_stopped_with_advice(
    base: BaseModel, tmp_path: Path
) -> None:
    settings = DistillSettings(**{**SETTINGS, "max_prompt_tokens": 2})
    with pytest.raises(MedusaTrainError, match=r"0 of 20 prompts .* give a file of prompts"):
        distill(base, settings=settings, output=tmp_path / "out")


def test_a_model_writes_its_own_prompts(base: BaseModel, tmp_path: Path) -> None:
    """A random model ends some turns by chance; those become prompts, rendered by the template."""
    settings = DistillSettings(**{**SETTINGS, "max_prompt_tokens": 400, "num_prompts": 16})
    distill(base, settings=settings, output=tmp_path / "out")
    rows = read_conversations(tmp_path / "out")
    assert rows
    texts = [row.messages[0]["content"] for row in rows]
    assert len(set(texts)) == len(texts)
    assert all(text == text.strip() and text for text in texts)
    assert read_manifest(tmp_path / "out")["source"] == "magpie"


def test_a_template_whose_user_turn_ends_in_text() -> None:
    """No stop id ends the user's turn here, so the template's own words must."""
    base = make_base(template=VICUNA)
    chat = make_chat(base)
    assert chat.user_end_text.strip() == "ASSISTANT:"
    turns = UserTurns(chat, DistillSettings())
    stopping = turns.stopping(4)
    assert stopping.stop_text == "ASSISTANT:"
    assert stopping.is_end is not None
    tokens = base.tokenizer("Name a metal. ASSISTANT:", add_special_tokens=False)["input_ids"]
    ends = [stopping.is_end(tokens[:n]) for n in range(1, len(tokens) + 1)]
    assert ends.index(True) == len(tokens) - 1
    assert turns.read(Answer(tuple(tokens), "stop")) == ("Name a metal.", None)


def test_a_template_that_leaves_out_the_user_is_refused(tmp_path: Path) -> None:
    parts = (
        "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
        "{{ part['text'] }}{% endfor %}{% endfor %}"
    )
    settings = DistillSettings(sources=(PromptSource("demo", None),), num_prompts=4)
    with pytest.raises(InputError, match=r"leaves out the text of a user turn"):
        distill(make_base(template=parts), settings=settings, output=tmp_path / "out")


def test_a_template_without_a_user_header_writes_no_prompts(tmp_path: Path) -> None:
    base = make_base(template="{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(InputError, match="chat template: puts nothing before a user turn"):
        distill(base, settings=DistillSettings(**SETTINGS), output=tmp_path / "out")


def test_a_prompt_of_no_tokens_is_dropped(tmp_path: Path) -> None:
    template = "{% if 'number 7' not in messages[0].content %}{{ messages[0].content }}{% endif %}"
    path = tmp_path / "p.txt"
    path.write_text("Name a metal.\nName number 7.\n")
    settings = DistillSettings(
        **{**SETTINGS, "num_prompts": None}, sources=(PromptSource("file", str(path)),)
    )
    manifest = distill(make_base(template=template), settings=settings, output=tmp_path / "out")
    assert manifest["num_dropped"] == {"empty prompt": 1}


@pytest.mark.parametrize("name", ["tools", "messages", "add_generation_prompt"])
def test_variables_of_a_template_have_names_of_their_own(base: BaseModel, name: str) -> None:
    with pytest.raises(InputError, match=rf"chat_template_kwargs: '{name}' is not a variable"):
        make_chat(base, chat_template_kwargs={name: True})


@pytest.mark.parametrize(
    "changes", [{"system_prompt": "Be terse."}, {"turns": 2}, {"write_user_turns": True}]
)
def test_what_only_chats_have_is_refused_without_a_template(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    settings = DistillSettings(**SETTINGS, **changes)
    with pytest.raises(InputError, match=rf"data\.distill\.{next(iter(changes))}: is for chats"):
        distill(make_base(template=None), settings=settings, output=tmp_path / "out")


def test_system_prompt_goes_before_every_prompt(base: BaseModel, tmp_path: Path) -> None:
    settings = DistillSettings(
        **SETTINGS, sources=_prompts_file(tmp_path), system_prompt="You are terse."
    )
    distill(base, settings=settings, output=tmp_path / "out")
    for row in read_conversations(tmp_path / "out"):
        assert [message["role"] for message in row.messages] == ["system", "user", "assistant"]


def test_chats_without_a_template_are_refused(tmp_path: Path) -> None:
    """Case 15."""
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "Name a metal."}]}\n')
    settings = DistillSettings(
        **{**SETTINGS, "num_prompts": None}, sources=(PromptSource("file", str(path)),)
    )
    with pytest.raises(InputError, match=r"has no chat template.*data\.chat_template") as failure:
        distill(make_base(template=None), settings=settings, output=tmp_path / "out")
    assert failure.value.exit_code == 2


def test_text_without_a_template_is_continued(tmp_path: Path) -> None:
    """Case 15: plain text works."""
    base = make_base(template=None)
    settings = DistillSettings(**SETTINGS, sources=_prompts_file(tmp_path))
    distill(base, settings=settings, output=tmp_path / "out")
    rows = read_conversations(tmp_path / "out")
    assert len(rows) == 20
    for number, row in enumerate(rows):
        [(start, end)] = row.assistant_spans
        text = f"Name a colour, {number} of them."
        assert row.input_ids[:start] == make_chat(base).encode_text(text).input_ids
        assert (row.messages, end) == ((), len(row.input_ids))


def test_a_base_model_without_a_template_writes_freely(tmp_path: Path) -> None:
    base = make_base(template=None)
    distill(base, settings=DistillSettings(**SETTINGS), output=tmp_path / "out")
    rows = read_conversations(tmp_path / "out")
    assert {row.source for row in rows} == {"continuation"}
    assert {row.assistant_spans[0][0] for row in rows} == {1}
    assert {row.input_ids[0] for row in rows} == {base.tokenizer.bos_token_id}
    assert len({row.input_ids for row in rows}) == len(rows) > 15


def test_duplicate_prompts_are_dropped_within_and_across_blocks(
    base: BaseModel, tmp_path: Path
) -> None:
    path = tmp_path / "p.txt"
    path.write_text("Name a gas.\n" * 3 + "".join(f"{n}\n" for n in range(7)) + "name  a GAS.\n")
    settings = DistillSettings(
        **{**SETTINGS, "num_prompts": None}, sources=(PromptSource("file", str(path)),)
    )
    manifest = distill(base, settings=settings, output=tmp_path / "out")
    assert manifest["num_dropped"][EXACT_DUPLICATE] == 3


@pytest.mark.parametrize(
    ("answer", "changes", "fault"),
    [
        (Answer((7, 2), "stop"), {}, None),
        (Answer((2,), "stop"), {}, filters.EMPTY_ANSWER),
        (Answer((7, 8, 2), "stop"), {"min_answer_tokens": 3}, filters.SHORT_ANSWER),
        (Answer((7, 8), "length"), {"drop_cut": True}, filters.CUT_ANSWER),
        (Answer((7, 8), "length"), {}, None),
        (Answer((1, 3) * 9, "length"), {}, filters.LOOPING_ANSWER),
        (Answer((1, 3) * 9, "length"), {"loop_ngram": 0}, None),
    ],
)
def test_faults_of_answers(answer: Answer, changes: dict[str, Any], fault: str | None) -> None:
    settings = DistillSettings(num_prompts=1, loop_ngram=2, loop_repeats=4)
    from dataclasses import replace

    chat = make_chat(make_base())
    chat.stop_ids = frozenset({2})
    kept = filters.AnswerFilter(replace(settings, **changes), chat=chat)
    assert kept.answer_fault(answer) == fault


def test_looping_counts_ngrams_over_the_limit() -> None:
    assert not filters.is_looping([1, 2, 3] * 4, ngram=3, repeats=4)
    assert filters.is_looping([1, 2, 3] * 5, ngram=3, repeats=4)
    assert not filters.is_looping(range(100), ngram=2, repeats=1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_engine_equals_generate_one_prompt_at_a_time(architecture: str) -> None:
    """Slots, refills, shared prefixes and shrinking batches change no greedy token."""
    model = make_model(architecture, dtype=torch.float64)
    rng = torch.Generator().manual_seed(1)
    lengths = [3, 9, 30, 1, 14, 22, 5]
    prompts = [torch.randint(3, 64, (n,), generator=rng).tolist() for n in lengths]
    prompts += [[9, 8, 7, 6, 5, n] for n in range(10, 13)]
    engine = InProcessEngine(model, vocab_size=64, max_rows=3)
    answers = engine.generate(
        prompts,
        sampling=Sampling(0.0),
        stopping=Stopping(frozenset({2, 11}), 18),
        generator=torch.Generator(),
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=18, eos_token_id=[2, 11],
            pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert list(answer.token_ids) == expected
        assert answer.finish_reason == ("stop" if expected[-1] in {2, 11} else "length")


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.7),
        Sampling(1.3),
        Sampling(1.0, 0.8),
        Sampling(1.0, 1.0, 3),
        Sampling(0.8, 0.9, 5),
    ],
)
def test_draws_follow_the_processed_distribution(sampling: Sampling) -> None:
    """Chi-square against transformers' own processors, fixed seed."""
    from transformers import (
        LogitsProcessorList,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    torch.manual_seed(0)
    logits = torch.randn(1, 600) * 2
    processors = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    expected = torch.softmax(processors(None, logits.clone()), dim=-1)[0].double()
    num_draws = 20_000
    sampler = Sampler(sampling, generator=torch.Generator().manual_seed(5))
    counts = Counter(
        token for _ in range(10) for token in sampler.draw(logits.expand(2_000, -1)).tolist()
    )
    observed = torch.tensor([counts[token] for token in range(600)], dtype=torch.float64)
    assert not observed[expected == 0].any()
    large = expected * num_draws >= 5
    cells = [(observed[i], expected[i] * num_draws) for i in large.nonzero().flatten().tolist()]
    rest = (observed[~large].sum(), expected[~large].sum() * num_draws)
    if rest[1] >= 5:
        cells.append(rest)
    statistic = sum(float((o - e) ** 2 / e) for o, e in cells)
    freedom = max(len(cells) - 1, 1)
    # Wilson and Hilferty's normal approximation; 3.09 is p = 0.001.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 3.09


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    """Case 6: lm_head has more rows than the tokenizer has ids."""
    model = make_model(vocab_size=64)
    with torch.no_grad():
        model.lm_head.weight[50:] *= 100
    engine = InProcessEngine(model, vocab_size=50, max_rows=4)
    for temperature in (0.0, 1.0):
        answers = engine.generate(
            [[5, 6, n] for n in range(6)],
            sampling=Sampling(temperature),
            stopping=Stopping(frozenset(), 10),
            generator=torch.Generator().manual_seed(0),
        )
        assert max(token for answer in answers for token in answer.token_ids) < 50


def test_progress_says_the_yield(
    base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = DistillSettings(**SETTINGS, sources=_prompts_file(tmp_path))
    distill(base, settings=settings, output=tmp_path / "out")
    assert "conversations of 20 prompts" in capsys.readouterr().err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["end_of_turn"]["with"] + manifest["end_of_turn"]["without"] > 0
    assert END in base.tokenizer.get_vocab()
