"""A base model with its heads, used as one model of transformers is."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from medusa_train.base_model.features import output_projection
from medusa_train.base_model.fingerprint import first_line
from medusa_train.base_model.load import BaseModel
from medusa_train.decoding.acceptance import Typical
from medusa_train.decoding.generate import Generated, Generator
from medusa_train.errors import ArgumentError, InputError
from medusa_train.heads.checkpoint import load_heads
from medusa_train.heads.model import MedusaHeads
from medusa_train.trained_base import load_trained_base
from medusa_train.tree.topology import Tree, TreeError

CHOICES_FILE = "medusa_choices.json"
_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

# What a model's own generation config says of sampling does not go with greedy decoding.
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}

Paths = Iterable[Sequence[int]]


class MedusaModel:
    """Writes what its base model writes, several tokens at a time.

    What it refuses, in loading and in writing, is an :class:`~medusa_train.errors.InputError`;
    where an argument means nothing, it is an :class:`~medusa_train.errors.ArgumentError`, which is
    a ``ValueError`` too.

    Args:
        base: the base model.
        heads: of this base.
        tree: the candidates of each step; None for the top-1 chain of all heads.
        compiled: compile the step with ``torch.compile``: a minute or two at the first one, then
            faster; the weights must not change any more.

    Raises:
        InputError: decoding with heads cannot be exact on this model.
        ArgumentError: the tree does not fit.
    """

    def __init__(
        self,
        base: BaseModel,
        heads: MedusaHeads,
        *,
        tree: Tree | None = None,
        compiled: bool = False,
    ) -> None:
        self.base = base
        self.heads = heads
        self.tree = tree or Tree.chain(heads.config.num_heads)
        self._generator = Generator(
            base.model, heads, num_tokens=base.num_tokens, compiled=compiled
        )
        assert self._generator.heads is not None
        self._generator.heads.check_fits(self.tree)

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path,
        base_model: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        device: torch.device | str | None = None,
        tree: Tree | Paths | None = None,
        compiled: bool = False,
    ) -> MedusaModel:
        """Load heads and the base model that they name.

        Args:
            heads: a heads directory, such as RUN/heads.
            base_model: hub id or directory; None for the one that the heads name. Its fingerprint
                has to be the same.
            dtype: ``auto``, ``float32``, ``bfloat16``, ``float16`` or ``float64``, also as torch's
                own.
            attn_implementation: ``sdpa`` or ``eager``; None leaves the choice to transformers.
            trust_remote_code: run code that comes with the base model.
            device: None is accelerate's choice.
            tree: None for ``medusa_choices.json`` beside the heads, else the top-1 chain.
            compiled: compile the step with ``torch.compile``.

        Raises:
            ArgumentError: an argument that means nothing, or a tree that does not fit.
            InputError: no such heads or base, or another base.
        """
        directory = _directory(heads)
        given = None if tree is None else _as_tree(tree, where="tree")
        choices = directory / CHOICES_FILE
        if given is None and choices.exists():
            given = read_tree(choices)
        base = load_trained_base(
            directory,
            None if base_model is None else str(base_model),
            dtype=_dtype_name(dtype),
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            device=None if device is None else _usable(device),
        )
        weight, _ = output_projection(base.model)
        loaded, _ = load_heads(
            directory,
            base_fingerprint=base.fingerprint,
            hidden_size=weight.shape[1],
            vocab_size=weight.shape[0],
            device=base.device,
        )
        return cls(base, loaded, tree=given, compiled=compiled)

    @property
    def device(self) -> torch.device:
        """Where the model's input goes."""
        return self.base.device

    @property
    def tokenizer(self) -> Any:
        """The base model's."""
        return self.base.tokenizer

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        tree: Tree | Paths | None = None,
        typical: Typical | None = None,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        **kwargs: Any,
    ) -> Tensor | Generated:
        """Write as ``model.generate`` of transformers does, with its arguments.

        Greedy text is the base model's own; sampled text has the base model's own distribution,
        unless typical acceptance is asked for.

        Args:
            inputs: [B, P] prompts, padded on the left; or ``input_ids=`` and ``attention_mask=``.
            tree: other candidates than :attr:`tree`; no paths at all for one token a step.
            typical: accept what is plausible (paper, section 3.2); needs ``do_sample=True``.
            generation_config: as in transformers; ``max_new_tokens=`` and so on may be given too.
            streamer: gets each token of a single row as soon as it is certain.
            **kwargs: as in transformers.

        Returns:
            [B, T] ids; with ``return_dict_in_generate=True``, with statistics.

        Raises:
            ArgumentError: prompts, a tree or an option that means nothing or does not go with
                heads.
        """
        kwargs.setdefault("tokenizer", self.tokenizer)
        return self._generator.generate(
            inputs,
            tree=self.tree if tree is None else _as_tree(tree, where="tree"),
            typical=typical,
            generation_config=generation_config,
            streamer=streamer,
            **kwargs,
        )


def read_tree(path: Path) -> Tree:
    """A tree from a JSON file: a list of paths, or an object with them under ``paths``.

    Raises:
        InputError: no such file, or no tree.
    """
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: no such file; give a list of paths such as [[0], [0, 0]]") from (
            error
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    if isinstance(value, dict):
        value = value.get("paths")
    if not isinstance(value, list):
        raise InputError(f"{path}: must be a list of paths such as [[0], [0, 0]]")
    return _as_tree(value, where=str(path))


def _as_tree(tree: Tree | Paths, *, where: str) -> Tree:
    if isinstance(tree, Tree):
        return tree
    try:
        return Tree.from_paths(tree)
    except TreeError as error:
        raise ArgumentError(f"{where}: {error}") from error


def _directory(heads: object) -> Path:
    if not isinstance(heads, str | os.PathLike):
        raise ArgumentError(f"heads: must be a heads directory, such as RUN/heads, got {heads!r}")
    return Path(heads)


def _dtype_name(dtype: str | torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise ArgumentError(f"dtype: must be one of {', '.join(_DTYPES)}; got {dtype!r}")
    return name


def _usable(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(f"device: {device!r} cannot be used: {first_line(error)}") from error
