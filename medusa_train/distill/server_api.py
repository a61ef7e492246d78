"""What each form of server is sent, and what its answers mean.

``ids``: ``/v1/completions`` with token ids in and, mostly, out (vLLM, SGLang); ``text``: the same
with a text as prompt and no field that OpenAI does not know; ``transformers``: that, with a
generation config (``transformers serve``, which draws nothing without one); ``tgi``: ``/generate``,
a text in, token ids out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from medusa_train.distill.sampling import Sampling
from medusa_train.distill.server_http import MALFORMED_ANSWER, AttemptError
from medusa_train.distill.writer import Stopping, TeacherLogprobs

FEW_LOGPROBS = "too few log-probabilities"
COMPLETIONS, GENERATE = "/v1/completions", "/generate"
SGLANG = "sglang"
_TOKEN_ID = "token_id:"  # noqa: S105 the beginning of a key
_TGI_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ServerForm:
    """What one server takes and gives.

    Attributes:
        model: the id that it serves.
        style: how it is asked.
        gives_ids: whether its answers hold token ids.
        takes_seed: whether it may be sent a seed.
        draws: whether a temperature makes it draw; else it always takes the likeliest token.
        owner: what it says it is (``vllm``, ``sglang``), or nothing.
        max_length: the most positions of prompt and answer together, where it says so.
    """

    model: str
    style: Literal["ids", "text", "transformers", "tgi"]
    gives_ids: bool
    takes_seed: bool = True
    draws: bool = True
    owner: str = ""
    max_length: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how it is to be answered.

    Attributes:
        prompt_ids: token ids.
        prompt_text: the same as text, without a beginning that servers add themselves.
        sampling: how tokens are drawn.
        stopping: when the answer ends.
        seed: of the draws.
        num_logprobs: log-probabilities per token, or None.
    """

    prompt_ids: tuple[int, ...]
    prompt_text: str
    sampling: Sampling
    stopping: Stopping
    seed: int
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered.

    Attributes:
        token_ids: of the answer; None: the server gave none.
        text: of the answer, as the server gave it.
        finish_reason: ``stop`` or ``length``.
        stop_reason: the id or text that ended it, where the server says so.
        teacher: log-probabilities of each token, when asked for.
    """

    token_ids: tuple[int, ...] | None
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    teacher: TeacherLogprobs | None = None


def path_of(form: ServerForm) -> str:
    """Where requests go, below the base URL."""
    return GENERATE if form.style == "tgi" else COMPLETIONS


def body_of(form: ServerForm, request: Request) -> dict[str, Any]:
    """The JSON of a request."""
    if form.style == "tgi":
        return {"inputs": request.prompt_text, "parameters": _tgi_parameters(request)}
    sampling, stopping = request.sampling, request.stopping
    body: dict[str, Any] = {
        "model": form.model,
        "prompt": request.prompt_text,
        "max_tokens": stopping.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if form.takes_seed:
        body["seed"] = request.seed
    if stopping.stop_text is not None:
        body["stop"] = [stopping.stop_text]
    if form.style == "transformers":
        body["generation_config"] = json.dumps(_generation_config(request))
    if form.style == "ids":
        body |= {
            "prompt": list(request.prompt_ids),
            "return_token_ids": True,
            "stop_token_ids": sorted(stopping.stop_ids),
            # Where these are absent, servers take what the model's generation config says.
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        if request.num_logprobs is not None:
            body |= {"logprobs": request.num_logprobs, "return_tokens_as_token_ids": True}
    return body


def reply_of(form: ServerForm, value: Mapping[str, Any], request: Request, *, url: str) -> Reply:
    """Read an answer.

    Args:
        form: of the server.
        value: the JSON object.
        request: what was asked.
        url: the server's, for messages.

    Raises:
        AttemptError: the answer makes no sense, or lacks log-probabilities.
    """
    try:
        if form.style == "tgi":
            return _tgi_reply(value)
        return _completion(value, num_logprobs=request.num_logprobs)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        detail = f"{url}: {problem}"
        raise AttemptError(MALFORMED_ANSWER, detail, blame="answer") from error


def _generation_config(request: Request) -> dict[str, Any]:
    sampling, stop_ids = request.sampling, request.stopping.stop_ids
    config: dict[str, Any] = {
        "do_sample": sampling.temperature > 0,
        "max_new_tokens": request.stopping.max_new_tokens,
        "repetition_penalty": 1.0,
    }
    if stop_ids:
        config["eos_token_id"] = sorted(stop_ids)
    if sampling.temperature > 0:
        config |= {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
        }
    return config


def _tgi_parameters(request: Request) -> dict[str, Any]:
    sampling, stopping = request.sampling, request.stopping
    parameters: dict[str, Any] = {
        "max_new_tokens": stopping.max_new_tokens,
        "do_sample": sampling.temperature > 0,
        "details": True,
        "return_full_text": False,
        "seed": request.seed,
    }
    # TGI refuses the values that mean "off".
    if sampling.temperature > 0:
        parameters["temperature"] = sampling.temperature
    if sampling.temperature > 0 and sampling.top_p < 1:
        parameters["top_p"] = sampling.top_p
    if sampling.temperature > 0 and sampling.top_k:
        parameters["top_k"] = sampling.top_k
    if stopping.stop_text is not None:
        parameters["stop"] = [stopping.stop_text]
    return parameters


def _tgi_reply(value: Mapping[str, Any]) -> Reply:
    details = value["details"]
    ids = _ids([token["id"] for token in details["tokens"]])
    reason = _finish_reason(_TGI_REASONS.get(details["finish_reason"]))
    return Reply(ids, _text(value["generated_text"]), reason)


def _completion(value: Mapping[str, Any], *, num_logprobs: int | None) -> Reply:
    choice = value["choices"][0]
    text = _text(choice["text"])
    given = choice.get("token_ids")
    ids = None if given is None or (text and not given) else _ids(given)
    stop_reason = choice.get("stop_reason", choice.get("matched_stop"))
    teacher = None
    if num_logprobs is not None:
        if ids is None:
            raise ValueError("no token ids beside the log-probabilities")
        rows = choice["logprobs"]["top_logprobs"] if ids else []
        teacher = _teacher(rows, num=num_logprobs)
        if len(ids) != len(teacher.token_ids):
            raise ValueError(f"{len(ids)} token ids but {len(rows)} rows of log-probabilities")
    return Reply(
        token_ids=ids,
        text=text,
        finish_reason=_finish_reason(choice["finish_reason"]),
        stop_reason=stop_reason if isinstance(stop_reason, int | str) else None,
        teacher=teacher,
    )


def _finish_reason(value: Any) -> FinishReason:
    match value:
        case "stop":
            return "stop"
        case "length":
            return "length"
        case _:
            raise ValueError(f"finish_reason {value!r}")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text expected, got {type(value).__name__}")
    value.encode()  # halves of surrogate pairs are no text
    return value


def _ids(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("token ids that are no such")
    return tuple(values)


def _teacher(rows: Sequence[Mapping[str, float]], *, num: int) -> TeacherLogprobs:
    """The ``num`` most likely of each position; the drawn token may be there in addition."""
    best = [_most_likely(row, num=num) for row in rows]
    return TeacherLogprobs(
        token_ids=np.array([[i for _, i in row] for row in best], np.int32).reshape(-1, num),
        logprobs=np.array([[p for p, _ in row] for row in best], np.float32).reshape(-1, num),
    )


def _most_likely(row: Mapping[str, float], *, num: int) -> list[tuple[float, int]]:
    pairs = []
    for key, logprob in row.items():
        if not key.startswith(_TOKEN_ID):
            raise ValueError(f"log-probabilities without token ids ({key!r})")
        if math.isnan(logprob):
            raise ValueError("a log-probability that is no number")
        pairs.append((logprob, int(key.removeprefix(_TOKEN_ID))))
    if len(pairs) < num:
        detail = f"{len(pairs)} instead of {num} per token"
        raise AttemptError(FEW_LOGPROBS, detail, blame="prompt")
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[:num]
