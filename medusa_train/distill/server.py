"""A pool of OpenAI-compatible servers as the writer of responses.

Each call of :meth:`ServerWriter.write` waits for a free slot of a live server; many threads call
it. What the forms of servers need is in :mod:`medusa_train.distill.server_api`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import httpx

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.template import PROBES
from medusa_train.distill.sampling import Sampling
from medusa_train.distill.server_api import Request, body_of, path_of, reply_of
from medusa_train.distill.server_http import AttemptError, Http, StoppedError, base_url
from medusa_train.distill.server_pool import Lease, Server, ServerPool
from medusa_train.distill.server_probe import Needs, check_sampling, probe, probe_all
from medusa_train.distill.server_text import AnswerReader
from medusa_train.distill.writer import Answer, Failure, Stopping, Teacher
from medusa_train.errors import InputError

MAX_BACKOFF = 30.0
MAX_DOUBLINGS = 32
MAX_SEED = 2**63
# A prompt may take a server down each time; after so many it is the prompt's fault.
MAX_MOVES = 20


class ServerWriter:
    """Writes answers with servers; a context manager that closes the connections.

    Args:
        urls: base URLs, with or without ``/v1``.
        chat: tokenizer, template and stop ids of the model that they serve.
        model: its id there; None: the only one that they serve.
        concurrency: requests that run at once on each server.
        timeout: seconds without an answer after which a request is given up.
        max_retries: further tries of a prompt after a failed one.
        exact_ids: refuse servers that do not take and give token ids; else their text is
            tokenised here, and the answer says so.
        api_key_env: environment variable with the servers' key.
        teacher: log-probabilities that every answer must have.
        max_length: the most positions of prompt and answer that the model has, or None.
        give_up_after: seconds without any live server after which :meth:`write` gives up.
        backoff: seconds before the first retry; doubles from try to try.

    Raises:
        InputError: a server cannot do what is asked, or refuses the key.
        MedusaTrainError: no server answers.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        chat: ChatTokenizer,
        model: str | None,
        concurrency: int,
        timeout: float,
        max_retries: int,
        exact_ids: bool,
        api_key_env: str,
        teacher: Teacher | None,
        max_length: int | None,
        give_up_after: float = 600.0,
        backoff: float = 0.5,
    ) -> None:
        if teacher is not None and teacher.kind == "samples":
            raise InputError(
                "servers give the most likely log-probabilities, no independent draws; "
                "use the kind 'top', or write in process"
            )
        self._reader = AnswerReader(chat)
        self._max_retries = max_retries
        self._exact_ids = exact_ids
        self._teacher = teacher
        self._backoff = backoff
        bases = _bases(urls)
        self._num_workers = concurrency * len(bases)
        self._http = Http(
            timeout=timeout,
            num_connections=self._num_workers,
            api_key_env=api_key_env,
            auth={url: auth for url, auth in bases.items() if auth is not None},
        )
        try:
            self._needs = Needs(model, exact_ids, self._probe_request(chat))
            forms = probe_all(self._http, urls=list(bases), needs=self._needs)
            # One that is reached later must serve the same model.
            self._needs = replace(self._needs, model=next(iter(forms.values())).model)
            lengths = [max_length, *(form.max_length for form in forms.values())]
            self._max_length = min((n for n in lengths if n is not None), default=None)
            self._pool = ServerPool(
                [Server(url, forms.get(url)) for url in bases],
                concurrency=concurrency,
                check=lambda server: probe(self._http, url=server.url, needs=self._needs),
                ping=self._ping,
                stopped=self._http.stopped,
                interval=backoff,
                give_up_after=give_up_after,
            )
        except BaseException:
            self._http.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def max_length(self) -> int | None:
        return self._max_length

    @property
    def unit_size(self) -> int:
        return 1

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def teacher(self) -> Teacher | None:
        return self._teacher

    def identity(self) -> dict[str, Any]:
        """The servers' model; which machine answers decides nothing."""
        return {"writer": "server", "model": self._needs.model}

    def stop(self) -> None:
        """Make every running and waiting call of :meth:`write` raise at once, in its thread."""
        self._http.stop()
        self._pool.wake()

    def close(self) -> None:
        """Stop, and close the connections."""
        self.stop()
        self._pool.close()
        self._http.close()

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        stopping: Stopping,
        seed: int,
        on_tokens: Callable[[int], None],
        with_teacher: bool = True,
    ) -> list[Answer | Failure]:
        """Answer the prompts, one after the other; see :class:`Writer`."""
        teacher = self._teacher if with_teacher else None
        results = []
        for index, prompt in enumerate(prompts):
            room = stopping.max_new_tokens
            if self._max_length is not None:
                room = min(room, self._max_length - len(prompt))
            if not prompt or room < 1:
                raise ValueError(f"a prompt must have 1 to {self._max_length} tokens")
            request = Request(
                prompt_ids=tuple(prompt),
                prompt_text=self._reader.prompt_text(prompt),
                sampling=sampling,
                stopping=replace(stopping, max_new_tokens=room),
                seed=(seed + index) % MAX_SEED,
                num_logprobs=None if teacher is None else teacher.num,
            )
            result = self._answer(request)
            if isinstance(result, Answer):
                on_tokens(len(result.token_ids))
            results.append(result)
        return results

    def _answer(self, request: Request) -> Answer | Failure:
        num_failed = num_moves = 0
        while True:
            with self._pool.slot() as lease:
                try:
                    answer = self._ask(lease, request)
                except AttemptError as error:
                    if error.blame == "prompt":
                        return Failure(error.reason, error.detail)
                    failure, is_counted = error, self._pool.failed(lease, error)
                else:
                    self._pool.succeeded(lease)
                    return answer
            if not is_counted and num_moves < MAX_MOVES:
                num_moves += 1
                continue
            num_failed += 1
            if num_failed > self._max_retries:
                return Failure(failure.reason, f"{failure.detail} ({num_failed} tries)")
            self._wait(num_failed, already=failure.retry_after or 0.0)

    def _ask(self, lease: Lease, request: Request) -> Answer:
        form, url = lease.form, lease.server.url
        check_sampling(form, request, url=url)
        if form.style != "ids":
            self._reader.warn_if_read_otherwise(request.prompt_ids, request.prompt_text, url=url)
        response = self._http.send(url, path_of(form), body=body_of(form, request))
        reply = reply_of(form, self._http.json(response, url=url), request, url=url)
        return self._reader.answer(
            reply,
            prompt_ids=request.prompt_ids,
            stopping=request.stopping,
            exact_ids=self._exact_ids,
        )

    def _wait(self, num_failed: int, *, already: float) -> None:
        """Wait longer from try to try, and never as long as the other threads.

        Not where a server has asked for a longer wait (``already``): that is its own, and another
        one may be free.
        """
        longest = longest_pause(self._backoff, num_failed=num_failed)
        pause = random.uniform(longest / 2, longest)
        if pause > already and self._http.stopped.wait(pause):
            raise StoppedError

    def _ping(self, server: Server) -> bool:
        try:
            self._http.send(server.url, "/v1/models", body=None)
        except AttemptError:
            return False
        return True

    def _probe_request(self, chat: ChatTokenizer) -> Request:
        ids = chat.encode_text(PROBES[0]).input_ids
        return Request(
            prompt_ids=ids,
            prompt_text=self._reader.prompt_text(ids),
            sampling=Sampling(0.0),
            stopping=Stopping(chat.stop_ids, 1),
            seed=0,
            num_logprobs=None if self._teacher is None else self._teacher.num,
        )


def longest_pause(backoff: float, *, num_failed: int) -> float:
    """The most seconds to wait after so many failed tries."""
    return min(MAX_BACKOFF, backoff * 2.0 ** min(num_failed - 1, MAX_DOUBLINGS))


def _bases(urls: Sequence[str]) -> dict[str, httpx.Auth | None]:
    """Base URL of each server → its user and password, if any."""
    if not urls:
        raise InputError("servers: give at least one URL")
    bases: dict[str, httpx.Auth | None] = {}
    for given in urls:
        url, auth = base_url(given)
        if url in bases:
            raise InputError(f"{url}: the same server twice")
        bases[url] = auth
    return bases
