"""Log-probabilities that the engine keeps are those of a fresh forward pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from medusa_train.distill.in_process import InProcessEngine
from medusa_train.distill.in_process_writer import InProcessWriter
from medusa_train.distill.sampling import Sampling
from medusa_train.distill.teacher import TeacherRecorder, most_likely
from medusa_train.distill.writer import Answer, Stopping, Teacher, Writer
from medusa_train.errors import InputError
from tests.models_for_tests import ARCHITECTURES, make_model

PROMPTS = [[5, 6, 7, 8, n % 50 + 3] * (n % 4 + 1) for n in range(8)]
STOPPING = Stopping(frozenset({2, 11}), 18)
# The tokenizer has fewer ids than lm_head has rows.
VOCAB_SIZE = 60


def _answers(
    model: PreTrainedModel, teacher: Teacher | None, *, sampling: Sampling, **options: Any
) -> list[Answer]:
    engine = InProcessEngine(model, vocab_size=VOCAB_SIZE, max_rows=3)
    generator = torch.Generator().manual_seed(4)
    return engine.generate(
        PROMPTS,
        sampling=sampling,
        stopping=options.get("stopping", STOPPING),
        generator=generator,
        teacher=teacher,
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["top", "samples"])
def test_logprobs_are_those_of_a_fresh_forward_pass(architecture: str, kind: Any) -> None:
    """Rows refill, shrink and draw at a temperature; what is kept is before all of that."""
    model = make_model(architecture)
    answers = _answers(model, Teacher(kind, 5), sampling=Sampling(0.7, 0.9))
    assert {answer.finish_reason for answer in answers} <= {"stop", "length"}
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.teacher is not None
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        fresh = model(input_ids=ids).logits[0, len(prompt) - 1 : -1, :VOCAB_SIZE]
        fresh = fresh.float().log_softmax(dim=-1)
        kept = torch.from_numpy(answer.teacher.logprobs)
        kept_ids = torch.from_numpy(answer.teacher.token_ids)
        assert kept.dtype == torch.float32
        assert kept_ids.dtype == torch.int32
        assert kept.shape == kept_ids.shape == (len(answer.token_ids), 5)
        torch.testing.assert_close(kept, fresh.gather(1, kept_ids.long()), atol=1e-4, rtol=0)
        if kind == "top":
            torch.testing.assert_close(kept, fresh.topk(5).values, atol=1e-4, rtol=0)
            assert all(len(set(row)) == 5 for row in kept_ids.tolist())


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(1.0), Sampling(0.8, 0.9), Sampling(1.0, 1.0, 4)]
)
def test_a_teacher_changes_no_answer(sampling: Sampling) -> None:
    model = make_model()
    plain = _answers(model, None, sampling=sampling)
    assert all(answer.teacher is None for answer in plain)
    for teacher in (Teacher("top", 7), Teacher("samples", 7)):
        kept = _answers(model, teacher, sampling=sampling)
        assert [a.token_ids for a in kept] == [a.token_ids for a in plain]
        again = _answers(model, teacher, sampling=sampling)
        for first, second in zip(kept, again, strict=True):
            assert first.teacher is not None
            assert second.teacher is not None
            assert np.array_equal(first.teacher.token_ids, second.teacher.token_ids)
            assert np.array_equal(first.teacher.logprobs, second.teacher.logprobs)


def test_a_greedy_token_is_the_first_of_the_top() -> None:
    for answer in _answers(make_model(), Teacher("top", 2), sampling=Sampling(0.0)):
        assert answer.teacher is not None
        assert tuple(answer.teacher.token_ids[:, 0].tolist()) == answer.token_ids


def test_a_whole_vocabulary_sums_to_one_and_more_is_refused() -> None:
    model = make_model()
    for answer in _answers(model, Teacher("top", VOCAB_SIZE), sampling=Sampling(1.0)):
        assert answer.teacher is not None
        np.testing.assert_allclose(np.exp(answer.teacher.logprobs).sum(axis=1), 1, atol=1e-5)
    for num, words in ((VOCAB_SIZE + 1, "61 of 60 tokens is too large"), (0, "1 or more tokens")):
        with pytest.raises(ValueError, match=words):
            _answers(model, Teacher("top", num), sampling=Sampling(1.0))
        with pytest.raises(InputError, match=f"must be 1 to 60, .*; got {num}"):
            InProcessWriter(
                lambda: model,
                dtype=model.dtype,
                vocab_size=60,
                max_rows=1,
                unit_size=1,
                teacher=Teacher("top", num),
            )


@pytest.mark.parametrize("vocab_size", [5, 64, 1000, 1024])
@pytest.mark.parametrize("num", [1, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_most_likely_are_those_of_a_stable_sort(
    vocab_size: int, num: int, dtype: torch.dtype
) -> None:
    """Many equal logits, among them both zeros and the least that there is."""
    torch.manual_seed(0)
    logits = (torch.randn(50, vocab_size) * 2).round().to(dtype)
    logits[10:20] = -logits[10:20].abs()
    logits[20:30, 2:] = -torch.inf
    expected = logits.sort(dim=1, descending=True, stable=True).indices[:, :num]
    assert torch.equal(most_likely(logits, num), expected)


def test_samples_are_unbiased() -> None:
    """Chi-square of all draws against the distribution; they are independent within a row too."""
    torch.manual_seed(0)
    logits = torch.randn(1, 600) * 2
    expected = logits.double().softmax(dim=1)[0]
    recorder = TeacherRecorder(Teacher("samples", 40), generator=torch.Generator().manual_seed(3))
    for _ in range(5):
        recorder.record(logits.expand(200, -1), range(200))
    parts = recorder.results(200)
    assert all(part.token_ids.shape == (5, 40) for part in parts)
    drawn = np.concatenate([part.token_ids for part in parts])
    logprobs = np.concatenate([part.logprobs for part in parts])
    np.testing.assert_allclose(logprobs, expected.log().numpy()[drawn], atol=1e-5)
    counts = torch.from_numpy(np.bincount(drawn.ravel(), minlength=600)).double()
    large = expected * drawn.size >= 5
    wanted = expected[large] * drawn.size
    freedom = int(large.sum()) - 1
    statistic = float(((counts[large] - wanted) ** 2 / wanted).sum())
    # Wilson and Hilferty's normal approximation; 3.09 is p = 0.001.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert abs(z) < 3.09
    # Two draws of a row are the same token as often as two independent ones.
    same = drawn[:, ::2] == drawn[:, 1::2]
    chance = float((expected**2).sum())
    assert abs(same.mean() - chance) < 4 * (chance * (1 - chance) / same.size) ** 0.5


def test_an_answer_without_steps_has_no_rows() -> None:
    recorder = TeacherRecorder(Teacher("top", 2), generator=torch.Generator())
    assert [len(part.token_ids) for part in recorder.results(3)] == [0, 0, 0]
    assert recorder.results(0) == []
    recorder.record(torch.tensor([[0.0, 1.0, 2.0]]), [1])
    parts = recorder.results(3)
    assert [part.token_ids.tolist() for part in parts] == [[], [[2, 1]], []]
    assert [part.logprobs.shape for part in parts] == [(0, 2), (1, 2), (0, 2)]


def test_the_writer_is_the_engine_with_a_seed() -> None:
    model = make_model()
    made = InProcessWriter(
        lambda: model,
        dtype=model.dtype,
        vocab_size=VOCAB_SIZE,
        max_rows=3,
        unit_size=8,
        teacher=Teacher("top", 3),
    )
    writer: Writer = made
    steps: list[int] = []
    written = writer.write(
        PROMPTS, sampling=Sampling(1.0), stopping=STOPPING, seed=4, on_tokens=steps.append
    )
    expected = _answers(model, None, sampling=Sampling(1.0))
    assert all(isinstance(answer, Answer) for answer in written)
    answers = [answer for answer in written if isinstance(answer, Answer)]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert sum(steps) == sum(len(answer.token_ids) for answer in answers)
    assert all(answer.teacher is not None for answer in answers)
    without = writer.write(
        PROMPTS[:2],
        sampling=Sampling(1.0),
        stopping=STOPPING,
        seed=4,
        on_tokens=steps.append,
        with_teacher=False,
    )
    assert all(isinstance(answer, Answer) and answer.teacher is None for answer in without)
    assert (writer.max_length, writer.unit_size, writer.num_workers) == (512, 8, 1)
    assert writer.identity() == {
        "writer": "in process",
        "dtype": "float32",
        "max_rows": 3,
        "unit_size": 8,
    }
