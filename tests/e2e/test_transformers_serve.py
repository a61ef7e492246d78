"""A real server without token ids: `transformers serve` answers as the engine in this process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import httpx
import pytest
import torch

from medusa_train.base_model.load import BaseModel, load_base_model
from medusa_train.console import log
from medusa_train.data.chat import ChatTokenizer
from medusa_train.distill.in_process_writer import InProcessWriter
from medusa_train.distill.sampling import Sampling
from medusa_train.distill.server import ServerWriter
from medusa_train.distill.writer import Answer, Stopping, Writer
from medusa_train.errors import InputError

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
TOPICS = ("the sea", "copper", "Oslo", "a violin", "bread", "the moon", "chess", "a cactus",
          "winter", "a lighthouse")  # fmt: skip
QUESTIONS = ("What is {}?", "Write a line about {}.", "Say three facts about {}.",
             "Why do people like {}?", "Name something similar to {}.", "Describe {} to a child.",
             "Is {} old?", "Translate '{}' to French.", "Give a title for a book on {}.",
             "Ask me a question about {}.")  # fmt: skip
GREEDY = Sampling(0.0)
NUM_TOKENS = 16
# Two logits that are closer than this may change places with the order of a sum.
TIE = 1e-3

pytestmark = pytest.mark.e2e


@contextmanager
def _served(directory: Path, *options: str) -> Iterator[str]:
    """A server process with the real model; its base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log_file = directory / "log.txt"
    command = [
        str(Path(sys.executable).with_name("transformers")), "serve", str(MODEL), *options,
        "--dtype", "float32", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    quiet = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with log_file.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **quiet})
    try:
        _wait_until_ready(f"http://127.0.0.1:{port}", process=process, log_file=log_file)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return load_base_model(str(MODEL), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def chat(base: BaseModel) -> ChatTokenizer:
    return ChatTokenizer(base.tokenizer, stop_ids=base.stop_ids)


def _server_writer(url: str, chat: ChatTokenizer, *, exact_ids: bool = False) -> ServerWriter:
    return ServerWriter(
        [url],
        chat=chat,
        model=None,
        concurrency=16,
        timeout=60.0,
        max_retries=0,
        exact_ids=exact_ids,
        api_key_env="MEDUSA_TEST_KEY",
        teacher=None,
        max_length=None,
    )


def test_its_answers_are_those_of_the_engine_in_process(
    base: BaseModel, chat: ChatTokenizer, tmp_path: Path
) -> None:
    questions = [question.format(topic) for question in QUESTIONS for topic in TOPICS]
    prompts = [chat.encode_prompt([{"role": "user", "content": text}]) for text in questions]
    assert len(prompts) == 100
    own = InProcessWriter(
        lambda: base.model,
        dtype=base.model.dtype,
        vocab_size=chat.vocab_size,
        max_rows=50,
        unit_size=100,
        teacher=None,
    )
    expected = _write(own, prompts, chat)
    # Batching makes it fast enough for a test.
    with (
        _served(tmp_path, "--continuous-batching") as url,
        _server_writer(url, chat) as writer,
        ThreadPoolExecutor(writer.num_workers) as executor,
    ):
        answers = [*executor.map(lambda prompt: _write(writer, [prompt], chat)[0], prompts)]
        with pytest.raises(InputError, match="likeliest token at any temperature"):
            _write(writer, prompts[:1], chat, sampling=Sampling(0.7))
    assert all(answer.retokenised for answer in answers)
    num_equal_ids = num_ties = 0
    for prompt, mine, theirs in zip(prompts, expected, answers, strict=True):
        num_equal_ids += mine.token_ids == theirs.token_ids
        if _text(mine, chat) == _text(theirs, chat):
            # The server says "length" of an answer whose very last token ends it.
            is_last = len(mine.token_ids) == NUM_TOKENS
            assert is_last or mine.finish_reason == theirs.finish_reason
            continue
        gap = _gap(base, prompt, mine.token_ids, theirs.token_ids)
        assert gap < TIE, (mine, theirs)
        num_ties += 1
    log(f"equal ids: {num_equal_ids} of 100; equal text but for {num_ties} ties")
    assert num_equal_ids >= 90


def test_a_temperature_draws_and_a_seed_repeats(chat: ChatTokenizer, tmp_path: Path) -> None:
    """Without a generation config the server would write greedily whatever the temperature."""
    prompt = chat.encode_prompt([{"role": "user", "content": "Write a line about the sea."}])
    hot = Sampling(1.5, 0.95, 50)
    with _served(tmp_path) as url:
        with _server_writer(url, chat) as writer:
            answers = [
                _write(writer, [prompt], chat, sampling=hot, seed=seed)[0] for seed in (1, 1, 2)
            ]
        with pytest.raises(InputError, match=r"takes no token ids \(HTTP 422: Unexpected fields"):
            _server_writer(url, chat, exact_ids=True)
    texts = [_text(answer, chat) for answer in answers]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def _write(
    writer: Writer,
    prompts: Sequence[Sequence[int]],
    chat: ChatTokenizer,
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> list[Answer]:
    answers = writer.write(
        prompts,
        sampling=sampling,
        stopping=Stopping(chat.stop_ids, NUM_TOKENS),
        seed=seed,
        on_tokens=lambda _: None,
    )
    written = [answer for answer in answers if isinstance(answer, Answer)]
    assert len(written) == len(prompts), answers
    return written


def _text(answer: Answer, chat: ChatTokenizer) -> str:
    return str(chat.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True))


def _gap(
    base: BaseModel, prompt: Sequence[int], mine: Sequence[int], theirs: Sequence[int]
) -> float:
    """How far apart the logits of the first two ids that differ are, in a pass over both alike."""
    pairs = list(zip(mine, theirs, strict=False))
    shared = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    assert len(shared) < len(pairs), "one answer goes on where the other ends"
    a, b = pairs[len(shared)]
    with torch.inference_mode():
        logits = base.model(torch.tensor([[*prompt, *shared]])).logits[0, -1].float()
    return abs(float(logits[a] - logits[b]))


def _wait_until_ready(url: str, *, process: subprocess.Popen[bytes], log_file: Path) -> None:
    end = time.monotonic() + 90
    while True:
        assert process.poll() is None, log_file.read_text()
        assert time.monotonic() < end, log_file.read_text()
        try:
            httpx.get(f"{url}/health", timeout=2).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.2)
        else:
            return
