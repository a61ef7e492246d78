"""What a set of heads is: its shape, its layout and the base model that it belongs to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from medusa_train.errors import InputError

SPEC_VERSION = 1
Layout = Literal["full", "shared"]


@dataclass(frozen=True, slots=True)
class HeadsConfig:
    """The shape of the heads.

    Attributes:
        num_heads: K.
        num_layers: L, ResBlocks per head.
        layout: ``full``: every head has its own ``lm_head``; ``shared``: they reuse the base's.
        hidden_size: D of the base.
        vocab_size: V, rows of the base's ``lm_head`` (it may have more than the tokenizer has ids).
        truncated_vocab_size: tokens that the heads can name, or None for all V.
        lm_head_bias: whether the base's ``lm_head`` has a bias, and so the heads' own.
    """

    num_heads: int
    num_layers: int
    layout: Layout
    hidden_size: int
    vocab_size: int
    truncated_vocab_size: int | None = None
    lm_head_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "hidden_size", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.layout not in {"full", "shared"}:
            raise ValueError(f"layout must be 'full' or 'shared', got {self.layout!r}")
        size = self.truncated_vocab_size
        if size is not None and not 1 <= size <= self.vocab_size:
            raise ValueError(
                f"truncated_vocab_size must be from 1 to {self.vocab_size}, got {size!r}"
            )

    @property
    def num_logits(self) -> int:
        """Logits that a head gives: the truncated vocabulary, or V."""
        return self.truncated_vocab_size or self.vocab_size

    @property
    def head_parameters(self) -> int:
        """Parameters of one head; with the layout ``shared`` those of its ResBlocks alone."""
        size = self.hidden_size
        own = self.num_logits * (size + self.lm_head_bias) if self.layout == "full" else 0
        return self.num_layers * (size * size + size) + own


@dataclass(frozen=True, slots=True)
class TrainedFrom:
    """From what a base was trained together with its heads (Medusa-2).

    Attributes:
        original_fingerprint: of the base before that.
        directory: what training made of it, from the heads directory: adapters, trained weights, or
            a whole model.
    """

    original_fingerprint: str
    directory: str


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """Which base model the heads were trained on, and on what they were trained.

    Attributes:
        name_or_path: hub id or path, as the user gave it; of the original where it was trained too.
        fingerprint: of the base's config and weights; heads are refused on another one.
        gguf_file: the GGUF file in it, if that was loaded.
        revision: the hub revision, if one was asked for.
        chat_template_hash: hash of the chat template of the training data, if it had one.
        max_length: longest training sequence in tokens.
        trained: from what the base was trained with the heads; None where it stayed as it was.
    """

    name_or_path: str
    fingerprint: str
    gguf_file: str | None = None
    revision: str | None = None
    chat_template_hash: str | None = None
    max_length: int | None = None
    trained: TrainedFrom | None = None


def format_a_config(config: HeadsConfig, base: BaseIdentity) -> dict[str, Any]:
    """``config.json`` of the FasterDecoding layout; these keys and no others.

    Each count stands twice since engines read either name. Engines choke on ``model_type``,
    ``architectures`` and on any other key with "num" and "heads" in it (docs/formats.md).
    """
    return {
        "base_model_name_or_path": base.name_or_path,
        "medusa_num_heads": config.num_heads,
        "num_medusa_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "num_medusa_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_fc_bias": True,
    }


def to_spec(config: HeadsConfig, base: BaseIdentity) -> dict[str, Any]:
    """``heads_spec.json``: all that is needed to load the heads and to refuse a wrong base."""
    identity = asdict(base)
    if base.trained is None:
        # Most bases stay as they are, and their heads' files as they were.
        del identity["trained"]
    return {"schema_version": SPEC_VERSION, **asdict(config), "base_model": identity}


def from_spec(spec: Any, *, where: str) -> tuple[HeadsConfig, BaseIdentity]:
    """Read ``heads_spec.json``, strictly.

    Raises:
        InputError: a missing or unknown key, a wrong value, or another schema version.
    """
    if not isinstance(spec, dict):
        raise InputError(f"{where}: must be a JSON object, got {type(spec).__name__}")
    version = spec.get("schema_version")
    if version != SPEC_VERSION:
        raise InputError(f"{where}: schema_version: must be {SPEC_VERSION}, got {version!r}")
    rest = {key: value for key, value in spec.items() if key != "schema_version"}
    base = rest.pop("base_model", None)
    if not isinstance(base, dict):
        raise InputError(f"{where}: base_model: must be a JSON object, got {base!r}")
    trained = base.get("trained")
    try:
        if trained is not None:
            base = {**base, "trained": TrainedFrom(**trained)}
        return HeadsConfig(**rest), BaseIdentity(**base)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: {error}") from error
