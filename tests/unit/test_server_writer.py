from __future__ import annotations

import email.utils
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from medusa_train.data.chat import ChatTokenizer
from medusa_train.distill import server_api, server_http
from medusa_train.distill.sampling import Sampling
from medusa_train.distill.server import MAX_BACKOFF, ServerWriter, longest_pause
from medusa_train.distill.server_http import base_url
from medusa_train.distill.writer import Answer, Failure, Stopping, Teacher, Writer
from medusa_train.errors import InputError, MedusaTrainError
from tests.scripted_server import ScriptedServer, top_logprobs
from tests.tokenizers_for_tests import MISTRAL, PLAIN_ROLES, VICUNA, make_chat

GREEDY = Sampling(0.0)
KEY = "sk-very-secret"

Server = Callable[..., ScriptedServer]
Make = Callable[..., ServerWriter]


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return make_chat()


@pytest.fixture
def server(chat: ChatTokenizer) -> Iterator[Server]:
    started: list[ScriptedServer] = []

    def start(**options: Any) -> ScriptedServer:
        used = options.pop("chat", chat)
        [stop_id] = used.stop_ids
        started.append(ScriptedServer(used.tokenizer, stop_id=stop_id, **options))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def make(chat: ChatTokenizer) -> Iterator[Make]:
    made: list[ServerWriter] = []

    def build(*servers: ScriptedServer | str, **changes: Any) -> ServerWriter:
        options: dict[str, Any] = {
            "chat": chat,
            "model": None,
            "concurrency": 4,
            "timeout": 10.0,
            "max_retries": 2,
            "exact_ids": False,
            "api_key_env": "TEST_SERVER_KEY",
            "teacher": None,
            "max_length": None,
            "backoff": 0.02,
        }
        urls = [one if isinstance(one, str) else one.url for one in servers]
        made.append(ServerWriter(urls, **{**options, **changes}))
        return made[-1]

    yield build
    for one in made:
        one.close()


def ids_of(chat: ChatTokenizer, text: str) -> list[int]:
    return chat.encode_prompt([{"role": "user", "content": text}])


def ask(
    writer: ServerWriter, chat: ChatTokenizer, text: str = "Name a metal.", **changes: Any
) -> Answer | Failure:
    options: dict[str, Any] = {
        "sampling": GREEDY,
        "stopping": Stopping(chat.stop_ids, 100),
        "seed": 7,
        "on_tokens": lambda _: None,
    }
    [result] = writer.write([ids_of(chat, text)], **{**options, **changes})
    return result


def ask_all(writer: ServerWriter, chat: ChatTokenizer, texts: list[str]) -> list[Answer | Failure]:
    with ThreadPoolExecutor(writer.num_workers) as executor:
        return list(executor.map(lambda text: ask(writer, chat, text), texts))


def expected(
    server: ScriptedServer, chat: ChatTokenizer, text: str = "Name a metal.", **changes: Any
) -> Answer:
    ids = server.answer_ids(ids_of(chat, text))
    return Answer(**{"token_ids": ids, "finish_reason": "stop", **changes})


def test_it_is_a_writer_that_gives_the_servers_own_ids(
    server: Server, make: Make, chat: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    one = server()
    writer: Writer = make(one, exact_ids=True)
    assert capsys.readouterr().err == f"{one.url}: tiny, token ids in and out\n"
    assert writer.identity() == {"writer": "server", "model": "tiny"}
    assert (writer.unit_size, writer.num_workers, writer.max_length) == (1, 4, None)
    counts: list[int] = []
    prompts = [ids_of(chat, "Name a metal."), ids_of(chat, "Name a gas.")]
    results = writer.write(
        prompts,
        sampling=Sampling(0.7, 0.9, 5),
        stopping=Stopping(chat.stop_ids, 50, stop_text="USER:"),
        seed=2**63 - 1,
        on_tokens=counts.append,
    )
    seeds = [2**63 - 1, 0]
    assert results == [
        Answer(one.answer_ids(prompt, seed=seed), "stop")
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert counts == [len(r.token_ids) for r in results if isinstance(r, Answer)]
    assert one.prompts[0] == {
        "model": "tiny",
        "prompt": prompts[0],
        "max_tokens": 50,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": 2**63 - 1,
        "stop": ["USER:"],
        "stop_token_ids": sorted(chat.stop_ids),
        "return_token_ids": True,
    }


def test_cut_answers_have_no_end_of_turn(server: Server, make: Make, chat: ChatTokenizer) -> None:
    one = server()
    result = ask(make(one), chat, stopping=Stopping(chat.stop_ids, 2))
    ids = one.answer_ids(ids_of(chat, "Name a metal."))[:2]
    assert result == Answer(ids, "length")


@pytest.mark.parametrize("fault", ["500", "408", "429", "503", "hang", "cut", "malformed",
                                   "no ids", "strange"])  # fmt: skip
def test_a_fault_once_costs_a_try_and_nothing_else(
    server: Server, make: Make, chat: ChatTokenizer, fault: str
) -> None:
    one = server(faults={"metal": [fault]})
    writer = make(one, exact_ids=True, timeout=0.3 if fault == "hang" else 10.0)
    assert ask(writer, chat) == expected(one, chat)
    assert len(one.prompts) == 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("500", server_http.SERVER_ERROR),
        ("429", server_http.SERVER_BUSY),
        ("hang", server_http.TIMEOUT),
        ("drip", server_http.TIMEOUT),
        ("cut", server_http.LOST_CONNECTION),
        ("malformed", server_http.MALFORMED_ANSWER),
        ("no ids", server_http.MALFORMED_ANSWER),
        ("strange", server_http.MALFORMED_ANSWER),
        ("deep", server_http.MALFORMED_ANSWER),
        ("digits", server_http.MALFORMED_ANSWER),
        ("foreign ids", server_http.MALFORMED_ANSWER),
        ("huge ids", server_http.MALFORMED_ANSWER),
        ("half a character", server_http.MALFORMED_ANSWER),
        ("echo", server_http.MALFORMED_ANSWER),
    ],
)
def test_a_lasting_fault_fails_that_prompt_with_its_reason(
    server: Server, make: Make, chat: ChatTokenizer, fault: str, reason: str
) -> None:
    one = server(faults={"metal": itertools.repeat(fault)})
    writer = make(one, exact_ids=True, timeout=0.3 if fault in {"hang", "drip"} else 10.0)
    stopping = Stopping(chat.stop_ids, 12)
    metal, gas = (ask(writer, chat, f"Name a {n}.", stopping=stopping) for n in ("metal", "gas"))
    assert isinstance(metal, Failure)
    assert metal.reason == reason
    assert metal.detail.endswith("(3 tries)")
    assert gas == expected(one, chat, "Name a gas.")


@pytest.mark.parametrize("status", ["400", "413", "422", "418"])
def test_a_refused_prompt_is_not_tried_again(
    server: Server, make: Make, chat: ChatTokenizer, status: str
) -> None:
    one = server(faults={"metal": itertools.repeat(status)})
    writer = make(one)
    detail = f"{one.url}: HTTP {status}: scripted {status}"
    assert ask(writer, chat) == Failure(server_http.REFUSED, detail)
    assert len(one.prompts) == 1


def test_what_servers_say_is_one_line_that_no_terminal_obeys(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    one = server(faults={"metal": ["400"]}, said=": \x1b[31m\nred\x07")
    detail = f"{one.url}: HTTP 400: scripted 400: [31m red"
    assert ask(make(one), chat) == Failure(server_http.REFUSED, detail)


@pytest.mark.parametrize("status", ["401", "403", "404"])
def test_what_no_prompt_survives_is_an_input_error(
    server: Server, make: Make, chat: ChatTokenizer, status: str
) -> None:
    writer = make(server(faults={"metal": [status]}))
    with pytest.raises(InputError, match=f"HTTP {status}"):
        ask(writer, chat)


def test_a_redirect_is_an_input_error_that_says_where_to(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    writer = make(server(faults={"metal": ["302"]}))
    with pytest.raises(InputError, match=r"redirects to 'http://login.example/'; give the"):
        ask(writer, chat)


def test_a_wait_of_no_time_is_no_reason_to_hurry(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    one = server(faults={"metal": ["429", "429"]}, retry_after="0")
    writer = make(one, backoff=0.2)
    begin = time.monotonic()
    assert ask(writer, chat) == expected(one, chat)
    assert time.monotonic() - begin >= 0.1 + 0.2


def test_pauses_double_up_to_the_longest_one() -> None:
    pauses = [longest_pause(0.5, num_failed=n) for n in (1, 2, 3, 7, 5000)]
    assert pauses == [0.5, 1.0, 2.0, MAX_BACKOFF, MAX_BACKOFF]


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_waited_for(
    server: Server, make: Make, chat: ChatTokenizer, as_date: bool
) -> None:
    wait = email.utils.formatdate(time.time() + 1.5, usegmt=True) if as_date else "0.3"
    one = server(faults={"metal": ["429"]}, retry_after=wait)
    writer = make(one)
    begin = time.monotonic()
    assert ask(writer, chat) == expected(one, chat)
    assert time.monotonic() - begin >= 0.3


def test_who_must_wait_goes_to_another_server(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    busy = server(faults={"metal": ["429"]}, retry_after="30")
    free = server()
    assert ask(make(busy, free), chat) == expected(free, chat)
    assert (len(busy.prompts), len(free.prompts)) == (1, 1)


def test_empty_answers_and_missing_ends(server: Server, make: Make, chat: ChatTokenizer) -> None:
    one = server(faults={"metal": ["empty"], "gas": ["no end"], "ore": ["length"]})
    writer = make(one)
    [end] = chat.stop_ids
    assert ask(writer, chat) == Answer((end,), "stop")
    assert ask(writer, chat, "Name a gas.") == expected(one, chat, "Name a gas.")
    ids = one.answer_ids(ids_of(chat, "Name an ore."))[:2]
    assert ask(writer, chat, "Name an ore.") == Answer(ids, "length")


def test_requests_go_to_free_slots_and_never_beyond(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    slow, fast = server(delay=1.0), server(delay=0.02)
    writer = make(slow, fast, concurrency=3)
    assert writer.num_workers == 6
    texts = [f"Name {n} metals." for n in range(60)]
    assert ask_all(writer, chat, texts) == [expected(fast, chat, text) for text in texts]
    assert slow.most_running == fast.most_running == 3
    assert len(slow.prompts) + len(fast.prompts) == 60
    assert len(fast.prompts) > 2 * len(slow.prompts) > 0


def test_a_server_dies_halfway_and_comes_back(
    server: Server, make: Make, chat: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    lasting, dying = server(delay=0.02), server(delay=0.02, faults={"Name 9 ": ["die"]})
    # No try may be spent on the death of a server.
    writer = make(lasting, dying, max_retries=0)
    # The prompt that kills goes to the server that dies of it.
    texts = [f"Name {n} metals." for n in range(40)]
    texts += ["Name 9 metals."] * 20
    results = ask_all(writer, chat, texts)
    assert results == [expected(lasting, chat, text) for text in texts]
    said = capsys.readouterr().err
    assert said.count("the server leaves the pool") == 1
    assert "in the pool again" not in said
    num_before = len(dying.prompts)
    dying.start()
    _wait_until(lambda: "in the pool again" in capsys.readouterr().err)
    assert ask_all(writer, chat, texts[:20]) == results[:20]
    assert len(dying.prompts) > num_before


def test_a_single_server_may_be_away_for_a_while(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    one = server(faults={"metal": ["die"]})
    writer = make(one, max_retries=0)
    threading.Timer(0.3, one.start).start()
    assert ask(writer, chat) == expected(one, chat)


def test_no_server_for_too_long_says_how_to_go_on(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    one = server()
    writer = make(one, give_up_after=0.3)
    one.stop()
    with pytest.raises(MedusaTrainError, match=r"no server has answered for 0s .* run the same c"):
        ask(writer, chat)


def test_a_server_that_fails_again_and_again_leaves(
    server: Server, make: Make, chat: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = server(faults={"metal": itertools.repeat("500")})
    good = server(delay=0.05)
    writer = make(bad, good, concurrency=2, max_retries=8)
    texts = [f"Name {n} metals." for n in range(20)]
    assert ask_all(writer, chat, texts) == [expected(good, chat, text) for text in texts]
    assert "leaves the pool" in capsys.readouterr().err


def test_servers_that_are_away_at_the_start(
    server: Server, make: Make, chat: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    late, one = server(), server(delay=0.02)
    late.stop()
    with pytest.raises(MedusaTrainError, match=r"no server answers: .*refused") as failure:
        make(late)
    assert failure.value.exit_code == 1
    writer = make(late, one)
    assert "going on without this server" in capsys.readouterr().err
    assert ask(writer, chat) == expected(one, chat)
    late.start()
    _wait_until(lambda: "in the pool again" in capsys.readouterr().err)
    ask_all(writer, chat, [f"Name {n} metals." for n in range(20)])
    assert late.prompts


def test_a_late_server_with_another_model_is_left_out(
    server: Server, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    late, one = server(models=["other"]), server()
    late.stop()
    make(late, one)
    late.start()
    _wait_until(lambda: "does not exist.; the server is left out" in capsys.readouterr().err)


def test_models_of_servers(server: Server, make: Make) -> None:
    two = server(models=["a", "b"])
    with pytest.raises(InputError, match=r"several models \(a, b\); say which one"):
        make(two)
    assert make(two, model="b").identity()["model"] == "b"
    with pytest.raises(InputError, match=r"lists no model; say which one"):
        make(server(models=[]))
    with pytest.raises(InputError, match=r"lists no model; say which one"):
        make(server(models=[None]))
    with pytest.raises(InputError, match=r"The model `c` does not exist"):
        make(two, model="c")
    with pytest.raises(InputError, match=r"serve different models"):
        make(server(models=["a"]), server(models=["b"]))


def test_the_servers_bound_of_positions_counts(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    one = server(max_model_len=100)
    writer = make(one, max_length=512)
    assert writer.max_length == 100
    ask(writer, chat, stopping=Stopping(chat.stop_ids, 99))
    assert one.prompts[0]["max_tokens"] == 100 - len(ids_of(chat, "Name a metal."))
    with pytest.raises(ValueError, match="1 to 100 tokens"):
        ask(writer, chat, "metal " * 100)


def test_a_wrong_key_is_refused_without_saying_it(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = server(api_key=KEY)
    with pytest.raises(InputError, match=r"HTTP 401: .* TEST_SERVER_KEY is not set"):
        make(one)
    monkeypatch.setenv("TEST_SERVER_KEY", f"{KEY}-not")
    with pytest.raises(InputError, match=r"HTTP 401: .* TEST_SERVER_KEY is refused") as failure:
        make(one)
    assert KEY not in str(failure.value)


@pytest.mark.parametrize("key", [f"{KEY}\nX", f"{KEY}\u00fc"])
def test_a_key_that_cannot_be_sent_is_refused_without_saying_it(
    server: Server, make: Make, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("TEST_SERVER_KEY", key)
    with pytest.raises(InputError, match=r"TEST_SERVER_KEY: holds characters") as failure:
        make(server())
    assert KEY not in str(failure.value)


def test_the_key_is_sent_and_never_said(
    server: Server,
    chat: ChatTokenizer,
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")  # of httpx too, which says URLs
    one, other = server(api_key=KEY, faults={"gas": ["400"]}), server()
    monkeypatch.setenv("TEST_SERVER_KEY", KEY)
    writer = make(one)
    assert ask(writer, chat) == expected(one, chat)
    assert one.requests[-1][2]["Authorization"] == f"Bearer {KEY}"
    refused = ask(writer, chat, "Name a gas.")
    with_password = make(other.url.replace("//", "//me:password@"))
    assert other.requests[-1][2]["Authorization"].startswith("Basic ")
    said = [caplog.text, str(refused), str(writer.identity()), repr(vars(with_password))]
    assert "HTTP Request" in caplog.text
    assert not any(secret in text for text in said for secret in (KEY, "password"))


def test_urls() -> None:
    for given in ("http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/"):
        assert base_url(given) == ("http://h:8000", None)
    url, auth = base_url("https://me:password@h/x/v1")
    assert url == "https://h/x"
    assert isinstance(auth, httpx.BasicAuth)
    for bad in ("localhost:8000", "http://", "http://h?key=1", "ftp://h", "http://h:x",
                "http://a..b", f"http://{'a' * 300}", "http://xn--a"):  # fmt: skip
        with pytest.raises(InputError):
            base_url(bad)
    with pytest.raises(InputError) as failure:
        base_url("ftp://me:password@h")
    assert "password" not in str(failure.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP_PROXY", "foo://me:password@h"),
        ("NO_PROXY", "[::x"),
        ("SSL_CERT_FILE", "/not/there.pem"),
    ],
)
def test_an_environment_that_makes_no_sense_is_named(
    make: Make, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="check HTTP_PROXY") as failure:
        make("http://127.0.0.1:1")
    assert "password" not in str(failure.value)


def test_urls_of_a_pool(server: Server, make: Make) -> None:
    with pytest.raises(InputError, match="at least one URL"):
        make()
    one = server()
    with pytest.raises(InputError, match="the same server twice"):
        make(one, f"{one.url}/v1/")


@pytest.mark.parametrize("style", ["text", "transformers", "tgi", "ids-only-in"])
def test_exact_ids_refuses_servers_without(server: Server, make: Make, style: str) -> None:
    with pytest.raises(InputError, match=r"(takes|gives) no token ids.* \(vLLM"):
        make(server(style=style), exact_ids=True)


@pytest.mark.parametrize("style", ["text", "transformers", "tgi", "ids-only-in"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_is_tokenised_after_its_prompt(
    server: Server, make: Make, style: str, adds_bos: bool
) -> None:
    chat = make_chat(adds_bos=adds_bos)
    one = server(chat=chat, style=style, faults={"ore": ["empty"], "gas": ["length"]})
    writer = make(one, chat=chat)
    retokenised = style != "tgi"
    assert ask(writer, chat) == expected(one, chat, retokenised=retokenised)
    [end] = chat.stop_ids
    assert ask(writer, chat, "Name an ore.") == Answer((end,), "stop", retokenised)
    gas = ask(writer, chat, "Name a gas.")
    assert gas == Answer(one.answer_ids(ids_of(chat, "Name a gas."))[:2], "length", retokenised)


@pytest.mark.parametrize("template", [VICUNA, MISTRAL, PLAIN_ROLES])
def test_text_of_other_templates(server: Server, make: Make, template: str) -> None:
    """An end-of-turn label where the template has one; without it, none."""
    chat = make_chat(template, eos="</s>", adds_bos=template is not PLAIN_ROLES)
    one = server(chat=chat, style="text")
    result = ask(make(one, chat=chat), chat)
    assert isinstance(result, Answer)
    ids = one.answer_ids(ids_of(chat, "Name a metal."))
    has_end = template is not PLAIN_ROLES
    text, words = (chat.tokenizer.decode(list(i)) for i in (result.token_ids, ids[:-1]))
    assert text == words + ("</s>" if has_end else "")
    assert (result.token_ids[-1] in chat.stop_ids) == has_end
    assert (result.finish_reason, result.retokenised) == ("stop", True)


def test_a_prompt_that_a_text_server_reads_otherwise_is_warned_of_once(
    server: Server, make: Make, chat: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tokenizer adds a BOS that this template does not have."""
    other = make_chat(PLAIN_ROLES, eos="</s>")
    for used, count in ((chat, 0), (other, 1)):
        writer = make(server(chat=used, style="text"), chat=used)
        ask_all(writer, used, [f"Name {n} metals." for n in range(9)])
        assert capsys.readouterr().err.count("reads as other token ids") == count


def test_text_servers_are_sent_what_they_know(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    plain, serve, tgi = (server(style=style) for style in ("text", "transformers", "tgi"))
    strict = server(style="text", refused_fields=frozenset({"seed"}))
    sampling = Sampling(0.7, 0.9)
    for one in (plain, serve, tgi, strict):
        ask(make(one), chat, sampling=sampling, stopping=Stopping(chat.stop_ids, 9))
    assert set(plain.prompts[0]) == {
        "model", "prompt", "max_tokens", "temperature", "top_p", "seed",
    }  # fmt: skip
    assert set(strict.prompts[0]) == set(plain.prompts[0]) - {"seed"}
    assert set(serve.prompts[-1]) == {*plain.prompts[0], "generation_config"}
    assert '"do_sample": true' in serve.prompts[-1]["generation_config"]
    assert tgi.prompts[0]["parameters"] == {
        "max_new_tokens": 9, "do_sample": True, "details": True, "return_full_text": False,
        "seed": 7, "temperature": 0.7, "top_p": 0.9,
    }  # fmt: skip
    with pytest.raises(InputError, match="cannot draw with top_k 5"):
        ask(make(plain), chat, sampling=Sampling(0.7, 1.0, 5))


def test_sampling_that_a_server_does_not_follow_is_refused(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    """`transformers serve` keeps the sampling of its first request with continuous batching."""
    with pytest.raises(InputError, match="draws at temperature 0"):
        make(server(style="transformers", fixed_temperature=1.0))
    one = server(style="transformers", fixed_temperature=0.0)
    writer = make(one)
    assert ask(writer, chat) == expected(one, chat, retokenised=True)
    with pytest.raises(InputError, match=r"likeliest token at any temperature.*got 0\.7"):
        ask(writer, chat, sampling=Sampling(0.7))


def test_sglang_gives_log_probabilities_after_temperature(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    one = server(owner="sglang")
    writer = make(one, teacher=Teacher("top", 4))
    for temperature in (0.0, 1.0):
        assert isinstance(ask(writer, chat, sampling=Sampling(temperature)), Answer)
    with pytest.raises(InputError, match=r"SGLang gives log-probabilities after temperature"):
        ask(writer, chat, sampling=Sampling(0.7))
    assert isinstance(ask(writer, chat, sampling=Sampling(0.7), with_teacher=False), Answer)


def test_an_answer_without_ids_is_tokenised_where_that_is_allowed(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    one = server(faults={"metal": ["no ids"]})
    writer = make(one)
    assert ask(writer, chat) == expected(one, chat, retokenised=True)
    assert ask(writer, chat) == expected(one, chat)


def test_teacher_rows_are_the_most_likely_of_each_token(
    server: Server, make: Make, chat: ChatTokenizer
) -> None:
    one = server()
    writer = make(one, teacher=Teacher("top", 4))
    assert writer.teacher == Teacher("top", 4)
    result = ask(writer, chat)
    assert isinstance(result, Answer)
    assert result.teacher is not None
    assert result.token_ids == expected(one, chat).token_ids
    rows = [top_logprobs(t, place=p, num=4) for p, t in enumerate(result.token_ids)]
    assert result.teacher.token_ids.tolist() == [list(row)[:4] for row in rows]
    assert result.teacher.logprobs.tolist() == [list(row.values())[:4] for row in rows]
    assert result.teacher.token_ids.dtype == np.int32
    assert result.teacher.logprobs.dtype == np.float32
    assert one.prompts[0]["logprobs"] == 4
    without = ask(writer, chat, with_teacher=False)
    assert without == expected(one, chat)
    assert "logprobs" not in one.prompts[-1]


def test_teacher_rows_must_be_whole(server: Server, make: Make, chat: ChatTokenizer) -> None:
    one = server(
        faults={
            "metal": ["few"],
            "gas": itertools.repeat("no end"),
            "river": itertools.repeat("foreign logprobs"),
        }
    )
    writer = make(one, teacher=Teacher("top", 4))
    few = ask(writer, chat)
    assert isinstance(few, Failure)
    assert few.reason == server_api.FEW_LOGPROBS
    unended = ask(writer, chat, "Name a gas.")
    assert isinstance(unended, Failure)
    assert "no log-probabilities of the token that ended" in unended.detail
    foreign = ask(writer, chat, "Name a river.")
    assert isinstance(foreign, Failure)
    assert "log-probabilities of token ids that are not in the base model's" in foreign.detail


def test_teachers_that_servers_cannot_be(server: Server, make: Make) -> None:
    with pytest.raises(InputError, match=r"no independent draws"):
        make(server(), teacher=Teacher("samples", 4))
    for style in ("text", "transformers", "tgi"):
        with pytest.raises(InputError, match=r"no token ids of log-probabilities"):
            make(server(style=style), teacher=Teacher("top", 4))
    for style in ("sglang", "ids-only-in"):
        with pytest.raises(InputError, match=r"gives no 4 log-probabilities per token with"):
            make(server(style=style), teacher=Teacher("top", 4))
    with pytest.raises(InputError, match=r"gives no 4 log-probabilities per token"):
        make(server(refused_fields=frozenset({"logprobs"})), teacher=Teacher("top", 4))


@pytest.mark.parametrize("state", ["running", "waiting for a slot", "backing off", "all down"])
def test_stop_ends_every_kind_of_waiting(
    server: Server, make: Make, chat: ChatTokenizer, state: str
) -> None:
    fault = {"all down": "die", "backing off": "500"}.get(state, "hang")
    one = server(faults={"metal": itertools.repeat(fault)}, hang_seconds=20.0)
    writer = make(one, concurrency=1, timeout=20.0, backoff=20.0 if fault == "500" else 0.02)
    num_calls = 2 if state == "waiting for a slot" else 1
    with ThreadPoolExecutor(num_calls) as executor:
        calls = [executor.submit(ask, writer, chat) for _ in range(num_calls)]
        time.sleep(0.3)
        begin = time.monotonic()
        writer.stop()
        for call in calls:
            with pytest.raises(MedusaTrainError, match="run the same command again"):
                call.result(timeout=5)
    assert time.monotonic() - begin < 2


def _wait_until(condition: Callable[[], bool], *, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
