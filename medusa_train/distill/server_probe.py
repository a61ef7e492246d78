"""What one server can do, found by asking it for one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Literal

from medusa_train.console import log, warn
from medusa_train.distill.sampling import Sampling
from medusa_train.distill.server_api import (
    SGLANG,
    Reply,
    Request,
    ServerForm,
    body_of,
    path_of,
    reply_of,
)
from medusa_train.distill.server_http import BUSY, AttemptError, Http
from medusa_train.errors import InputError, InputErrors, MedusaTrainError

# Answers that are drawn so are not alike by chance.
_DRAWN_TOKENS, _DRAWN_SAMPLING = 8, Sampling(2.0)
# How `transformers serve` refuses a field, and nobody else.
_TRANSFORMERS_REFUSAL = "Unexpected fields in the request"


@dataclass(frozen=True, slots=True)
class Needs:
    """What every server of a pool must do.

    Attributes:
        model: its id; None: the only one that a server has.
        exact_ids: token ids in and out.
        request: for one token, with log-probabilities where answers must have them.
    """

    model: str | None
    exact_ids: bool
    request: Request


def probe(http: Http, *, url: str, needs: Needs) -> ServerForm:
    """Ask a server for its model and for one token.

    Args:
        http: sends requests.
        url: base, without ``/v1``.
        needs: what it must do.

    Raises:
        InputError: it cannot do what is needed, or refuses the key; says why.
        AttemptError: it does not answer, or not yet.
    """
    form = _model(http, url=url, model=needs.model)
    form, refusal = _style(http, form, url=url, request=needs.request)
    if form.style == "transformers":
        form = replace(form, draws=_draws(http, form, url=url, request=needs.request))
    if needs.exact_ids and not (form.style == "ids" and form.gives_ids):
        what = "gives no token ids" if form.style == "ids" else f"takes no token ids ({refusal})"
        raise InputError(
            f"{url}: {what}, so its rows would be re-tokenised text; use a server that does "
            "(vLLM, SGLang), or allow it (exact_ids: false)"
        )
    if needs.request.num_logprobs is not None and form.style != "ids":
        raise InputError(
            f"{url}: gives no token ids of log-probabilities before temperature ({refusal}); "
            "use vLLM, or leave the teacher out"
        )
    return form


def probe_all(http: Http, *, urls: Sequence[str], needs: Needs) -> dict[str, ServerForm]:
    """:func:`probe` all servers at once, and log what each can do.

    Returns:
        URL → form of those that answer; all serve one model.

    Raises:
        InputError: at least one cannot do what is needed; says why for each.
        MedusaTrainError: none answers.
    """

    def outcome_of(url: str) -> ServerForm | InputError | AttemptError:
        try:
            return probe(http, url=url, needs=needs)
        except (InputError, AttemptError) as error:
            return error

    with ThreadPoolExecutor(max_workers=len(urls)) as executor:
        outcomes = dict(zip(urls, executor.map(outcome_of, urls), strict=True))
    refusals = [outcome for outcome in outcomes.values() if isinstance(outcome, InputError)]
    if refusals:
        raise InputErrors([line for refusal in refusals for line in refusal.lines])
    forms = {url: form for url, form in outcomes.items() if isinstance(form, ServerForm)}
    for url, form in forms.items():
        log(f"{url}: {_description(form, with_teacher=needs.request.num_logprobs is not None)}")
    missing = [outcome.detail for outcome in outcomes.values() if isinstance(outcome, AttemptError)]
    if not forms:
        raise MedusaTrainError(f"no server answers: {'; '.join(missing)}")
    if len({form.model for form in forms.values()}) > 1:
        listed = ", ".join(f"{url}: {form.model}" for url, form in forms.items())
        raise InputError(
            f"the servers serve different models ({listed}); say which one "
            "(data.distill.server.model)"
        )
    for detail in missing:
        warn(f"{detail}; going on without this server, which is tried again")
    return forms


def _description(form: ServerForm, *, with_teacher: bool) -> str:
    """What a server can do, in a few words."""
    match form.style:
        case "ids" if form.gives_ids:
            what = "token ids in and out"
        case "ids":
            what = "token ids in, text out (answers are re-tokenised)"
        case "tgi":
            what = "text in, token ids out"
        case _:
            what = "text in and out (answers are re-tokenised)"
    return f"{form.model}, {what}" + (", log-probabilities" if with_teacher else "")


def _model(http: Http, *, url: str, model: str | None) -> ServerForm:
    """The model that a server serves, from its list or, where it has none, from TGI's page."""
    entries: list[Mapping[str, Any]] = []
    for path in ("/v1/models", "/info"):
        response = http.send(url, path, body=None)
        http.check_access(response, url=url)
        if not _is_refusal(response.status_code):
            entries = _entries(http.json(response, url=url))
            break
    listed = {entry["id"]: entry for entry in entries}
    if model is None and len(listed) != 1:
        has = f"serves several models ({', '.join(listed)})" if listed else "lists no model"
        raise InputError(f"{url}: {has}; say which one (data.distill.server.model)")
    chosen = next(iter(listed)) if model is None else model
    entry = listed.get(chosen, {})
    longest = entry.get("max_model_len")
    return ServerForm(
        model=chosen,
        style="ids",
        gives_ids=True,
        owner=str(entry.get("owned_by", "")),
        max_length=longest if type(longest) is int and longest > 0 else None,
    )


def _entries(value: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "model_id" in value:
        return [{"id": value["model_id"]}]
    data = value.get("data")
    if not isinstance(data, list):
        return []
    return [entry for entry in data if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def _style(http: Http, form: ServerForm, *, url: str, request: Request) -> tuple[ServerForm, str]:
    """The first form that the server takes, and why it did not take token ids."""
    reply, refusal = _try(http, form, url=url, request=request)
    if reply is not None:
        return replace(form, gives_ids=reply.token_ids is not None), ""
    if request.num_logprobs is not None:
        plain = replace(request, num_logprobs=None)
        if _try(http, form, url=url, request=plain)[0] is not None:
            raise InputError(
                f"{url}: gives no {request.num_logprobs} log-probabilities per token with their "
                f"ids ({refusal}); ask for fewer, use vLLM, or leave the teacher out"
            )
    text: Literal["text", "transformers"] = (
        "transformers" if _TRANSFORMERS_REFUSAL in refusal else "text"
    )
    others = [
        replace(form, style="tgi"),
        replace(form, style=text, gives_ids=False),
        replace(form, style=text, gives_ids=False, takes_seed=False),
    ]
    request = replace(request, num_logprobs=None)
    last = refusal
    for other in others:
        reply, message = _try(http, other, url=url, request=request)
        if reply is not None:
            return other, refusal
        last = last if other.style == "tgi" else message
    raise InputError(f"{url}: answers no request for one token: {last}")


def _try(http: Http, form: ServerForm, *, url: str, request: Request) -> tuple[Reply | None, str]:
    """The server's reply, or what it says against this form of request."""
    response = http.send(url, path_of(form), body=body_of(form, request))
    http.check_access(response, url=url)
    is_tgi = form.style == "tgi"
    if _is_refusal(response.status_code) or (is_tgi and response.status_code != HTTPStatus.OK):
        return None, http.describe(response)
    try:
        value = http.json(response, url=url)
        return reply_of(form, value, request, url=url), ""
    except AttemptError as error:
        # A page of another kind under TGI's address, or log-probabilities without ids.
        if is_tgi or (request.num_logprobs is not None and error.blame in {"answer", "prompt"}):
            return None, error.detail
        raise


def _draws(http: Http, form: ServerForm, *, url: str, request: Request) -> bool:
    """Whether `transformers serve` draws; with continuous batching its first request decides.

    Raises:
        InputError: it draws even at temperature 0.
    """
    stopping = replace(request.stopping, max_new_tokens=_DRAWN_TOKENS)
    request = replace(request, stopping=stopping, num_logprobs=None)

    def is_drawn(sampling: Sampling) -> bool:
        requests = [replace(request, sampling=sampling, seed=seed) for seed in (1, 2)]
        texts = set()
        for one in requests:
            response = http.send(url, path_of(form), body=body_of(form, one))
            texts.add(reply_of(form, http.json(response, url=url), one, url=url).text)
        return len(texts) > 1

    if is_drawn(request.sampling):
        raise InputError(
            f"{url}: draws at temperature 0, since with continuous batching `transformers serve` "
            "keeps the sampling of its first request; start it anew"
        )
    return is_drawn(_DRAWN_SAMPLING)


def _is_refusal(status: int) -> bool:
    """Whether a status says that the request is wrong, rather than its moment."""
    client_error = HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR
    return client_error and status not in BUSY


def check_sampling(form: ServerForm, request: Request, *, url: str) -> None:
    """Refuse what a server would silently do otherwise.

    Raises:
        InputError: says which setting it is.
    """
    sampling = request.sampling
    if form.style == "text" and sampling.top_k and sampling.temperature > 0:
        raise InputError(f"{url}: cannot draw with top_k {sampling.top_k}; set it to 0")
    if sampling.temperature > 0 and not form.draws:
        raise InputError(
            f"{url}: takes the likeliest token at any temperature, since with continuous batching "
            "`transformers serve` keeps the sampling of its first request; start it without, or "
            f"set temperature to 0, got {sampling.temperature}"
        )
    after_temperature = form.owner == SGLANG and sampling.temperature not in {0.0, 1.0}
    if request.num_logprobs is not None and after_temperature:
        raise InputError(
            f"{url}: SGLang gives log-probabilities after temperature; with a teacher set "
            f"temperature to 0 or 1, got {sampling.temperature}"
        )
