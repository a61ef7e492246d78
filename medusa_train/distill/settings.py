"""What one generation is: flat values, the same names as in a recipe's ``data.distill``.

How answers come about (in process or from servers, in what batches) is the writer's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from medusa_train.distill.sampling import Sampling


@dataclass(frozen=True, slots=True)
class PromptSource:
    """One source of a mixture of prompts.

    Attributes:
        source: ``model`` (it writes them itself), ``file``, ``dataset`` or ``demo``.
        path: the file, or the name or directory of the data set.
        name: configuration of the data set.
        split: of the data set.
        column: of the data set; None finds it.
        limit: the most rows that are read; None reads all.
        weight: its share of the prompts, relative to the other sources.
    """

    source: Literal["model", "file", "dataset", "demo"]
    path: str | None = None
    name: str | None = None
    split: str = "train"
    column: str | None = None
    limit: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class DistillSettings:
    """How prompts are got and how answers are drawn; ``docs/recipes.md`` describes each field."""

    sources: tuple[PromptSource, ...] = (PromptSource("model"),)
    num_prompts: int | None = None
    turns: int = 1
    write_user_turns: bool = False
    system_prompt: str | None = None
    max_prompt_tokens: int = 512
    prompt_temperature: float = 1.0
    prompt_top_p: float = 1.0
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512
    seed: int = 0
    min_answer_tokens: int = 1
    drop_cut: bool = False
    loop_ngram: int = 8
    loop_repeats: int = 4
    near_duplicate: float | None = None
    languages: tuple[str, ...] = ()

    @property
    def prompt_sampling(self) -> Sampling:
        """How the model draws prompts."""
        return Sampling(self.prompt_temperature, self.prompt_top_p)

    @property
    def answer_sampling(self) -> Sampling:
        """How the model draws answers."""
        return Sampling(self.temperature, self.top_p, self.top_k)

    def row_sampling(self) -> dict[str, Any]:
        """What every row says of how its answer was drawn."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
        }
