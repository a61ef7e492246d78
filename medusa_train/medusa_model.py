"""A base model with its heads, used as one model of transformers is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from medusa_train.base_model.features import output_projection
from medusa_train.base_model.load import BaseModel
from medusa_train.decoding.acceptance import Typical
from medusa_train.decoding.generate import Generated, Generator
from medusa_train.errors import InputError
from medusa_train.heads.checkpoint import load_heads
from medusa_train.heads.model import MedusaHeads
from medusa_train.trained_base import load_trained_base
from medusa_train.tree.topology import Tree, TreeError

CHOICES_FILE = "medusa_choices.json"

# What a model's own generation config says of sampling does not go with greedy decoding.
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}

Paths = Iterable[Sequence[int]]


class MedusaModel:
    """Writes what its base model writes, several tokens at a time.

    Args:
        base: the base model.
        heads: of this base.
        tree: the candidates of each step; None for the top-1 chain of all heads.
        compiled: compile the step with ``torch.compile``: a minute or two at the first one, then
            faster; the weights must not change any more.

    Raises:
        InputError: decoding with heads cannot be exact on this model, or the tree does not fit.
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
        base_model: str | None = None,
        *,
        dtype: str = "auto",
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
            dtype: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
            attn_implementation: ``sdpa`` or ``eager``; None leaves the choice to transformers.
            trust_remote_code: run code that comes with the base model.
            device: None is accelerate's choice.
            tree: None for ``medusa_choices.json`` beside the heads, else the top-1 chain.
            compiled: compile the step with ``torch.compile``.

        Raises:
            InputError: no such heads or base, another base, or a tree that does not fit.
        """
        directory = Path(heads)
        base = load_trained_base(
            directory,
            base_model,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            device=device,
        )
        weight, _ = output_projection(base.model)
        loaded, _ = load_heads(
            directory,
            base_fingerprint=base.fingerprint,
            hidden_size=weight.shape[1],
            vocab_size=weight.shape[0],
            device=base.device,
        )
        if tree is None:
            choices = directory / CHOICES_FILE
            tree = read_tree(choices) if choices.exists() else None
        chosen = None if tree is None else _as_tree(tree, where="tree")
        return cls(base, loaded, tree=chosen, compiled=compiled)

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
            InputError: an option that does not go with heads, or a tree that does not fit.
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
        raise InputError(f"{where}: {error}") from error
