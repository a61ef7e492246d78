"""What the sections of a recipe are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from medusa_train.limits import (
    MAX_BOOTSTRAP,
    MAX_CONCURRENCY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TIMEOUT,
)

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
CountOrOff = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]
Temperature = Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)]
NumBootstrap = Annotated[int, Field(ge=1, le=MAX_BOOTSTRAP)]
Probability = Annotated[float, Field(gt=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Concurrency = Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)]
Timeout = Annotated[float, Field(gt=0.0, le=MAX_TIMEOUT)]
Language = Annotated[str, Field(pattern="^[a-z]{2,3}$")]


class Section(BaseModel):
    """A part of a recipe: unknown keys are refused and nothing is converted silently."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )
