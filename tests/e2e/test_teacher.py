"""What the engine keeps of the real model is what a fresh forward pass says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from medusa_train.base_model.load import load_base_model
from medusa_train.data.chat import ChatTokenizer
from medusa_train.distill.in_process_writer import InProcessWriter
from medusa_train.distill.sampling import Sampling
from medusa_train.distill.writer import Answer, Stopping, Teacher

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
QUESTIONS = ("Name a metal.", "What is the capital of France?", "Why is the sky blue?", "Hi!")

pytestmark = pytest.mark.e2e


def test_logprobs_equal_a_fresh_forward_pass() -> None:
    base = load_base_model(str(MODEL), dtype="float32")
    chat = ChatTokenizer(base.tokenizer, stop_ids=base.stop_ids)
    prompts = [chat.encode_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    for teacher in (Teacher("top", 20), Teacher("samples", 20)):
        writer = InProcessWriter(
            lambda: base.model,
            dtype=base.model.dtype,
            vocab_size=chat.vocab_size,
            max_rows=3,
            unit_size=4,
            teacher=teacher,
        )
        answers = writer.write(
            prompts,
            sampling=Sampling(0.7),
            stopping=Stopping(chat.stop_ids, 24),
            seed=0,
            on_tokens=lambda _: None,
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert isinstance(answer, Answer)
            assert answer.teacher is not None
            ids = torch.tensor([[*prompt, *answer.token_ids]])
            with torch.inference_mode():
                logits = base.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            fresh = logits[:, : chat.vocab_size].log_softmax(dim=-1).numpy()
            kept = answer.teacher
            expected = np.take_along_axis(fresh, kept.token_ids.astype(np.int64), axis=1)
            np.testing.assert_allclose(kept.logprobs, expected, atol=1e-3, rtol=0)
            if teacher.kind == "top":
                best = -np.sort(-fresh, axis=1)[:, :20]
                np.testing.assert_allclose(kept.logprobs, best, atol=1e-3, rtol=0)
