"""What ``generate`` takes: sampling, processors, stops and streams, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, MaxTimeCriteria, TextStreamer
from transformers.generation import BaseStreamer

from medusa_train.decoding import decoder
from medusa_train.decoding.acceptance import Typical
from medusa_train.decoding.generate import Generated, Generator
from medusa_train.errors import ArgumentError, InputError
from medusa_train.tree.topology import Tree
from tests.decoding_for_tests import CHAIN, FULL_TREE, fitted_heads, random_heads
from tests.models_for_tests import make_model
from tests.tokenizers_for_tests import make_tokenizer

MODEL = make_model("llama", dtype=torch.float64, vocab_size=64)
WIDE = Tree.from_paths([(a,) for a in range(8)] + [(a, b) for a in range(8) for b in range(4)])
GENERATOR = Generator(MODEL, random_heads(MODEL), num_tokens=64)
PROMPT = torch.tensor([[5, 9, 33, 2, 60]])
BATCH = {
    "input_ids": torch.tensor([[5, 9, 33, 2, 60], [0, 0, 7, 8, 9], [0, 4, 4, 4, 4]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]),
}


def ours(inputs: dict[str, Tensor], *, tree: Tree = WIDE, **options: Any) -> Generated:
    result = GENERATOR.generate(
        **inputs, tree=tree, return_dict_in_generate=True, pad_token_id=0, **options
    )
    assert isinstance(result, Generated)
    return result


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "encoder-repetition": {"encoder_repetition_penalty": 1.9},
    "ngrams": {"no_repeat_ngram_size": 2},
    "encoder-ngrams": {"encoder_no_repeat_ngram_size": 1},
    "bad-words": {"bad_words_ids": [[3], [17, 4]]},
    "min-new": {"min_new_tokens": 9, "eos_token_id": list(range(20, 50))},
    "suppress": {"suppress_tokens": [1, 2, 3], "begin_suppress_tokens": [50]},
    "forced-eos": {"forced_eos_token_id": 11, "eos_token_id": 11},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 40},
    "bias": {"sequence_bias": [[[30], 2.0], [[30, 31], 4.0]]},
    "prefix": {"prefix_allowed_tokens_fn": lambda row, ids: [(len(ids) * 7 + row) % 64, 5 + row]},
    "all": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
}


@pytest.mark.parametrize(
    "architecture", ["llama", "gpt2", "opt", "mistral", "gemma2", "deepseek_v3", "gpt_neox"]
)
@pytest.mark.parametrize("num_rows", [1, 2])
def test_a_long_prompt_is_read_in_parts(
    architecture: str, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(architecture, dtype=torch.float64).eval()
    generator = Generator(model, random_heads(model), num_tokens=64)
    sizes: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _module, arguments, _output: sizes.append(arguments[0].numel())
    )
    ids = torch.randint(3, 64, (num_rows, 11), generator=torch.Generator().manual_seed(3))

    def write() -> Tensor:
        sizes.clear()
        result = generator.generate(
            ids, attention_mask=torch.ones_like(ids), tree=CHAIN, max_new_tokens=6, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert isinstance(result, Tensor)
        return result

    whole = write()
    assert sizes[0] == ids.numel()
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 4 * num_rows)
    assert torch.equal(write(), whole)
    if generator.plan.window is None:
        assert sizes[:3] == [4 * num_rows, 4 * num_rows, 3 * num_rows]
    else:
        assert sizes[0] == ids.numel()


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("inputs", [{"input_ids": PROMPT}, BATCH], ids=["one", "batch"])
def test_processors_see_the_text_of_their_own_path(name: str, inputs: dict[str, Tensor]) -> None:
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, **PROCESSORS[name]}
    plain = MODEL.generate(**inputs, **options)
    del options["pad_token_id"]
    assert torch.equal(ours(inputs, **options).sequences, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_p": 0.9, "temperature": 1.2},
        {"top_k": 7, "repetition_penalty": 1.3},
        {"min_p": 0.1, "typical_p": 0.9},
    ],
)
@pytest.mark.parametrize("tree", [CHAIN, FULL_TREE, WIDE], ids=["chain", "2x2x2", "wide"])
def test_a_seed_gives_the_text_of_plain_sampling(options: dict[str, Any], tree: Tree) -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=20, eos_token_id=[13, 14], **options)
    for seed in range(2):
        torch.manual_seed(seed)
        plain = MODEL.generate(PROMPT, generation_config=config)
        after = torch.rand(1)
        torch.manual_seed(seed)
        result = GENERATOR.generate(PROMPT, tree=tree, generation_config=config)
        assert torch.equal(result, plain)
        # One draw for each token: what is drawn afterwards is the same too.
        assert torch.equal(torch.rand(1), after)


def test_rows_that_end_early_leave_a_large_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 64, (64, 6), generator=generator)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [3, 8, 13, 21, 34, 55]}
    plain = MODEL.generate(ids, pad_token_id=0, attention_mask=torch.ones_like(ids), **options)
    result = ours({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **options)
    assert torch.equal(result.sequences, plain)
    assert len({len(steps) for steps in result.statistics.accepted}) > 1


def test_several_answers_to_one_prompt() -> None:
    result = ours(
        {"input_ids": PROMPT}, do_sample=True, num_return_sequences=5, max_new_tokens=6
    ).sequences
    assert result.shape == (5, 11)
    assert len({tuple(row) for row in result.tolist()}) > 1


def test_stop_strings() -> None:
    tokenizer = make_tokenizer()
    model = make_model("llama", dtype=torch.float64, vocab_size=len(tokenizer))
    ids = tokenizer("hello there", return_tensors="pt")["input_ids"]
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, max_new_tokens=20, **options)
    heads = fitted_heads(model, [plain[0]], start=ids.shape[1])
    generator = Generator(model, heads, num_tokens=len(tokenizer))
    text = tokenizer.decode(plain[0, ids.shape[1] + 4 : ids.shape[1] + 6])
    options |= {"max_new_tokens": 20, "stop_strings": [text], "tokenizer": tokenizer}
    stopped = model.generate(ids, **options)
    assert torch.equal(generator.generate(ids, tree=CHAIN, **options), stopped)
    assert stopped.shape[1] < plain.shape[1]
    config = GenerationConfig(max_new_tokens=20, stop_strings=[text], pad_token_id=0)
    result = generator.generate(
        ids, tree=CHAIN, generation_config=config, tokenizer=tokenizer, do_sample=False
    )
    assert torch.equal(result, stopped)
    with pytest.raises(InputError, match="stop_strings: need the tokenizer"):
        generator.generate(ids, tree=CHAIN, stop_strings=[text])


class _Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.has_ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value)

    def end(self) -> None:
        self.has_ended = True


def test_streamers_get_what_plain_generation_gives_them(capsys: pytest.CaptureFixture[str]) -> None:
    plain, mine = _Recorder(), _Recorder()
    MODEL.generate(PROMPT, max_new_tokens=9, do_sample=False, streamer=plain)
    GENERATOR.generate(PROMPT, tree=WIDE, max_new_tokens=9, do_sample=False, streamer=mine)
    assert [part.tolist() for part in mine.parts] == [part.tolist() for part in plain.parts]
    assert mine.has_ended
    tokenizer = make_tokenizer()
    model = make_model("llama", vocab_size=len(tokenizer))
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    generator = Generator(model, None, num_tokens=len(tokenizer))
    result = generator.generate(PROMPT, tree=Tree(()), max_new_tokens=5, streamer=streamer)
    assert capsys.readouterr().out.strip() == tokenizer.decode(result[0, 5:]).strip()
    with pytest.raises(InputError, match="streamer: needs a batch of one row, got 3"):
        ours(BATCH, streamer=mine, max_new_tokens=5)


def test_criteria_of_the_user_are_asked_after_each_token() -> None:
    lengths: list[int] = []

    def is_long(ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        lengths.append(ids.shape[1])
        return torch.full((1,), ids.shape[1] >= 11)

    result = ours({"input_ids": PROMPT}, stopping_criteria=[is_long], max_new_tokens=30)
    assert result.sequences.shape[1] == 11
    assert lengths == list(range(6, 12))
    result = ours(
        {"input_ids": PROMPT}, stopping_criteria=[MaxTimeCriteria(0.0)], max_new_tokens=30
    )
    assert result.sequences.shape[1] == 6


def test_typical_acceptance_accepts_at_least_what_is_plausible() -> None:
    options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 40}
    torch.manual_seed(0)
    strict = ours({"input_ids": PROMPT}, **options).statistics
    torch.manual_seed(0)
    loose = ours({"input_ids": PROMPT}, typical=Typical(0.01, 0.05), **options).statistics
    assert loose.acceptance_length > strict.acceptance_length
    batch = ours(BATCH, typical=Typical(0.01, 0.05), repetition_penalty=1.2, **options)
    assert batch.statistics.num_tokens == 120
    with pytest.raises(InputError, match="typical: is a way to sample"):
        ours({"input_ids": PROMPT}, typical=Typical(), do_sample=False)


def test_learned_positions_to_their_very_end() -> None:
    model = make_model("gpt2", dtype=torch.float64, n_positions=32)
    generator = Generator(model, random_heads(model), num_tokens=64)
    options: dict[str, Any] = {"max_length": 32, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(**BATCH, **options)
    assert torch.equal(generator.generate(**BATCH, tree=FULL_TREE, **options), plain)


def test_without_heads_the_loop_is_plain_decoding() -> None:
    generator = Generator(MODEL, None, num_tokens=64)
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    result = generator.generate(**BATCH, tree=Tree(()), return_dict_in_generate=True, **options)
    assert torch.equal(result.sequences, MODEL.generate(**BATCH, **options))
    assert result.statistics.acceptance_length == 1
    with pytest.raises(InputError, match="there are no heads to fill it"):
        generator.generate(PROMPT, tree=CHAIN)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam_search: does not go with heads"),
        ({"cache_implementation": "static"}, "cache_implementation: 'static' cannot be rolled"),
        ({"output_scores": True}, "output_scores: is not there"),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidanceLogitsProcessor: counts"),
        ({"tree": Tree.chain(4)}, r"path \[0, 0, 0, 0\]: has depth 4, but there are 3 heads"),
        ({"tree": Tree.from_paths([(64,)])}, r"path \[64\]: has rank 64"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0]])}, "must be padded on the left alone"),
    ],
)
def test_what_does_not_go_with_heads_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ours({"input_ids": PROMPT}, max_new_tokens=5, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"typical": (0.1, 0.3), "do_sample": True}, r"typical: must be Typical\(epsilon, delta\)"),
        ({"generation_config": {"max_new_tokens": 5}}, "generation_config: must be a Generation"),
        ({"streamer": 5}, "streamer: must have put and end, got 5"),
        ({"stopping_criteria": 5}, "stopping_criteria: must be a list of criteria, got 5"),
        ({"input_ids": [[1, 2]]}, "input_ids: must be a tensor .* got list; give return_tensors"),
        ({"input_ids": torch.tensor([1, 2])}, r"input_ids: .* got int64 of shape \[2\]"),
        ({"input_ids": torch.tensor([[1.0]])}, r"input_ids: .* got float32 of shape \[1, 1\]"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"has no tokens: its shape is \[1, 0"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"has no tokens: its shape is \[0, 4"),
        ({"input_ids": torch.tensor([[64]])}, "64 is no token id of the base model, which has 64"),
        ({"input_ids": torch.tensor([[1, -3]])}, "-3 is no token id of the base model"),
        ({"attention_mask": torch.ones(1, 3)}, r"of input_ids, \[1, 5\], got \[1, 3\]"),
        ({"attention_mask": [[1] * 5]}, r"of input_ids, \[1, 5\], got list"),
        # What the library refuses.
        ({"max_new_tokens": 0}, "generate: .*max_new_tokens"),
        ({"max_new_tokens": "five"}, "generate: "),
        ({"do_sample": True, "temperature": 0.0}, "generate: .*temperature"),
        ({"do_sample": True, "temperature": float("nan")}, "generate: .*temperature"),
        ({"do_sample": True, "top_p": -0.5}, "generate: .*top_p"),
        ({"nothing_like_it": 1}, "generate: .*nothing_like_it"),
    ],
)
def test_arguments_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    arguments = {"input_ids": PROMPT, "tree": WIDE, "max_new_tokens": 5, **options}
    with pytest.raises(ArgumentError, match=message) as caught:
        GENERATOR.generate(**arguments)
    # Callers that know Python's own kind alone catch it too.
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, InputError)


def test_errors_of_a_criterion_of_the_user_stay_what_they_are() -> None:
    def broken(_ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        raise TypeError("of the user")

    with pytest.raises(TypeError, match="of the user") as caught:
        ours({"input_ids": PROMPT}, stopping_criteria=[broken], max_new_tokens=5)
    assert not isinstance(caught.value, InputError)
