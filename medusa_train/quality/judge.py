"""A language model on an OpenAI-compatible server as the judge of both models' answers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from medusa_train.console import log, progress, warn
from medusa_train.distill.server_http import (
    MALFORMED_ANSWER,
    AttemptError,
    Http,
    StoppedError,
    base_url,
)
from medusa_train.errors import InputError
from medusa_train.evaluate.judgement import Judgement, Preference, judge_figures
from medusa_train.quality.judge_words import (
    Message,
    pair_messages,
    read_preference,
    read_score,
    score_messages,
)

CHAT = "/v1/chat/completions"
MODELS = "/v1/models"
NO_JUDGEMENT = "no score or verdict in the judge's reply"
MAX_BACKOFF = 30.0


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """Who judges, and how it is asked.

    Attributes:
        url: base URL of the server.
        model: its name there.
        api_key_env: environment variable with the key, if it wants one.
        concurrency: requests at a time.
        timeout: seconds after which a request is given up.
        max_retries: how often a request is made again.
        max_tokens: of a reply.
        backoff: seconds before the second try; doubles from try to try.
        option: what the user calls the URL.
    """

    url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int = 4
    timeout: float = 120.0
    max_retries: int = 4
    max_tokens: int = 1024
    backoff: float = 1.0
    option: str = "--judge-url"

    def __post_init__(self) -> None:
        """Refuse what is no URL before anything is done."""
        base_url(self.url)


class Judge:
    """Asks one server; use as a context manager.

    Args:
        options: how.

    Raises:
        InputError: no URL, or a key that cannot be sent.
    """

    def __init__(self, options: JudgeOptions) -> None:
        self.options = options
        self.url, auth = base_url(options.url)
        self._http = Http(
            timeout=options.timeout,
            num_connections=options.concurrency,
            api_key_env=options.api_key_env,
            auth={} if auth is None else {self.url: auth},
        )

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def check(self) -> None:
        """See that somebody is there, before long work begins.

        Raises:
            InputError: no server answers, or it does not take the key.
        """
        try:
            response = self._http.send(self.url, MODELS, body=None)
        except AttemptError as error:
            raise InputError(
                f"{self.options.option}: no server answers: {error.detail}; start it, or leave the "
                "judge out"
            ) from error
        # Whatever else it says: not every server lists its models.
        self._http.check_access(response, url=self.url)

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[Judgement], Counter[str]]:
        """Judge both answers to each prompt.

        Args:
            rows: of ``answers`` in ``quality.json``.

        Returns:
            One judgement for each row, and the requests without an answer by reason.

        Raises:
            InputError: no request can succeed: a wrong key, model or address.
        """
        requests = [request for row, of in enumerate(rows) for request in _requests(row, of)]
        failures: Counter[str] = Counter()
        found: dict[tuple[int, str], Any] = {}
        log(f"judge {self.options.model}: {len(requests)} requests to {self.url}")
        with (
            ThreadPoolExecutor(self.options.concurrency) as threads,
            progress("judge", len(requests)) as bar,
        ):
            try:
                for request, result in zip(
                    requests, threads.map(self._answer, requests), strict=True
                ):
                    if isinstance(result, AttemptError):
                        if not failures[result.reason]:
                            warn(f"judge {self.options.model}: {result}")
                        failures[result.reason] += 1
                    else:
                        found[request.row, request.name] = result
                    bar.update(1, detail="requests")
            except BaseException:
                # What waits for an answer or its turn raises at once, so the threads end.
                self._http.stop()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return [_judgement(row, of, found) for row, of in enumerate(rows)], failures

    def _answer(self, request: _Request) -> Any:
        for num_failed in range(self.options.max_retries + 1):
            try:
                value = request.read(self._reply(request.messages))
                if value is None:
                    # At temperature 0 it would say the same once more.
                    raise AttemptError(NO_JUDGEMENT, self.url, blame="prompt")
            except AttemptError as error:
                failure = error
                if error.blame == "prompt":
                    break
                if num_failed < self.options.max_retries:
                    self._wait(num_failed, error.retry_after)
            else:
                return value
        return failure

    def _reply(self, messages: Sequence[Message]) -> str:
        body = {
            "model": self.options.model,
            "messages": list(messages),
            "temperature": 0.0,
            "max_tokens": self.options.max_tokens,
        }
        response = self._http.send(self.url, CHAT, body=body)
        value = self._http.json(response, url=self.url)
        try:
            text = value["choices"][0]["message"]["content"]
        except (LookupError, TypeError) as error:
            detail = f"{self.url}: no choices with a message"
            raise AttemptError(MALFORMED_ANSWER, detail, blame="answer") from error
        if not isinstance(text, str):
            raise AttemptError(MALFORMED_ANSWER, f"{self.url}: no text", blame="answer")
        return text

    def _wait(self, num_failed: int, retry_after: float | None) -> None:
        longest = min(MAX_BACKOFF, self.options.backoff * 2**num_failed)
        seconds = random.uniform(longest / 2, longest) if retry_after is None else retry_after
        if self._http.stopped.wait(min(seconds, MAX_BACKOFF)):
            raise StoppedError


@dataclass(frozen=True, slots=True)
class _Request:
    """One question to the judge.

    Attributes:
        row: of the answers.
        name: what its answer is kept as.
        messages: the chat.
        read: the reply → its value; None where there is none.
    """

    row: int
    name: str
    messages: list[Message]
    read: Callable[[str], Any]


def _requests(row: int, answers: Mapping[str, Any]) -> list[_Request]:
    """Two grades and both orders; equal answers are graded once and are a tie."""
    question, original, changed = (answers[key] for key in ("question", "original", "changed"))
    grades = [_Request(row, "original", score_messages(question, original), read_score)]
    if original == changed:
        return grades
    return [
        *grades,
        _Request(row, "changed", score_messages(question, changed), read_score),
        _Request(row, "first", pair_messages(question, original, changed), read_preference),
        _Request(row, "second", pair_messages(question, changed, original), read_preference),
    ]


def _judgement(
    row: int, answers: Mapping[str, Any], found: Mapping[tuple[int, str], Any]
) -> Judgement:
    score = found.get((row, "original"))
    if answers["original"] == answers["changed"]:
        return Judgement(("tie", "tie"), score, score)
    sides: tuple[Preference, Preference] = ("original", "changed")
    return Judgement(
        orders=(
            _preferred(found.get((row, "first")), *sides),
            _preferred(found.get((row, "second")), *sides[::-1]),
        ),
        original_score=score,
        changed_score=found.get((row, "changed")),
    )


def _preferred(said: str | None, first: Preference, second: Preference) -> Preference | None:
    match said:
        case "first":
            return first
        case "second":
            return second
        case "tie":
            return "tie"
    return None


def judge_report(
    judge: Judge, rows: Sequence[Mapping[str, Any]], *, num_bootstrap: int, seed: int
) -> dict[str, Any]:
    """``judge`` of ``quality.json``; see :meth:`Judge.judge`."""
    judgements, failures = judge.judge(rows)
    return {
        "model": judge.options.model,
        "url": judge.url,
        "num_prompts": len(rows),
        "num_same_text": sum(row["original"] == row["changed"] for row in rows),
        "failures": dict(sorted(failures.items())),
        **judge_figures(judgements, num_bootstrap=num_bootstrap, seed=seed),
    }
