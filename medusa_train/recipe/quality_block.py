"""What ``evaluate.quality`` may say, and the mistakes in it that tie keys together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field

from medusa_train.recipe.section import Concurrency, Count, CountOrOff, Positive, Section, Text
from medusa_train.recipe.yaml_reader import Key

Wrong = tuple[Key, str]
_WHERE: Key = ("evaluate", "quality")


class JudgeSection(Section):
    """A model on an OpenAI-compatible server that judges the answers of both."""

    url: Text
    """Base URL of the server, such as `http://host:8000/v1`, without user and password."""
    model: Text
    """Name of the model at the server."""
    api_key_env: Text = "OPENAI_API_KEY"
    """Environment variable that holds the key, if there is one; the key itself goes in no file."""
    concurrency: Concurrency = 4
    """Requests at a time."""


class QualitySection(Section):
    """The changed base model against the original, both in float32."""

    prompts: Text | None = None
    """File with prompts: the text is the original's greedy answers to their first user turns; null
    is the held-out conversations."""
    num_prompts: Count | None = None
    """The first so many of `prompts`; null is all."""
    num_answers: CountOrOff = 20
    """Prompts that both models answer, side by side in the report."""
    max_new_tokens: Count = 192
    """Longest answer in tokens."""
    min_agreement: Annotated[float, Field(ge=0.0, le=1.0)] = 0.98
    """Greedy agreement that the verdict wants."""
    max_perplexity_ratio: Positive = 1.02
    """Perplexity ratio that the verdict allows."""
    judge: JudgeSection | None = None
    """Who judges the answers side by side, in the way of MT-Bench; null is nobody."""
    lm_eval: list[Text] = Field(default_factory=list)
    """Tasks of lm-eval that both models do as well, by name or YAML file; needs the package
    lm_eval."""
    lm_eval_limit: Count | None = None
    """The first so many samples of each task; null is all."""


def quality_mistakes(value: Mapping[str, Any]) -> Iterator[Wrong]:
    """Yield what is wrong between the keys of ``evaluate.quality`` and others."""
    quality = _section(value, "evaluate").get("quality")
    if not isinstance(quality, dict):
        return
    if _section(value, "train").get("method", "medusa1") == "medusa1":
        yield _WHERE, "is for train.method: medusa2, which changes the base model; remove it"
    if quality.get("prompts") is None:
        if _section(value, "data").get("eval_fraction") == 0:
            message = (
                "needs held-out conversations or prompts; raise data.eval_fraction, or set prompts"
            )
            yield _WHERE, message
        if quality.get("num_prompts") is not None:
            yield (*_WHERE, "num_prompts"), "is for prompts; set them, or remove it"
    if isinstance(quality.get("judge"), dict):
        yield from _judge_mistakes(quality["judge"], quality)
    if quality.get("lm_eval_limit") is not None and not quality.get("lm_eval"):
        yield (*_WHERE, "lm_eval_limit"), "is for lm_eval; name tasks there, or remove it"


def _judge_mistakes(judge: Mapping[str, Any], quality: Mapping[str, Any]) -> Iterator[Wrong]:
    where: Key = (*_WHERE, "judge")
    if quality.get("num_answers") == 0:
        yield where, "judges answers; set num_answers above 0"
    url = judge.get("url")
    if not isinstance(url, str) or not url:
        return
    if "@" in url:
        # The run keeps its recipe, so it must not be repeated here either.
        yield (
            (*where, "url"),
            "must have no user or password in it, since the recipe is kept with the run; put a key "
            "into the environment variable that api_key_env names",
        )
    elif not _is_base_url(url):
        message = "must be the base URL of a server, such as http://host:8000/v1"
        yield (*where, "url"), f"{message}; got {url!r}"


def _is_base_url(text: str) -> bool:
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        return False
    is_web = parts.scheme in {"http", "https"} and bool(parts.hostname)
    return is_web and not (parts.query or parts.fragment)


def _section(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = value.get(name)
    return section if isinstance(section, dict) else {}
