"""Why an engine cannot load some heads, in words that say what to do instead."""

from __future__ import annotations

from medusa_train.errors import InputError
from medusa_train.export.source import HeadTensors, ServeOptions


def refuse(engine: str, reason: str, advice: str) -> InputError:
    """The error of heads that an engine cannot load."""
    return InputError(f"{engine} cannot load these heads: {reason}; {advice}")


def refuse_bias(heads: HeadTensors, engine: str) -> None:
    """Refuse a biased ``lm_head``: no engine's heads have one."""
    if heads.config.lm_head_bias:
        raise refuse(
            engine,
            "the base's lm_head has a bias, and so have the heads, but the engine's projections "
            "have none",
            "decode with export transformers",
        )


def refuse_truncated(heads: HeadTensors, engine: str) -> None:
    """Refuse a truncated vocabulary where the engine's heads have the base's rows."""
    if heads.config.truncated_vocab_size is not None:
        raise refuse(
            engine,
            f"they name {heads.config.num_logits:,} of {heads.config.vocab_size:,} tokens, but the "
            "engine takes row i of a head for token i",
            "train with heads.vocab_size: null, or with heads.layout: shared for vllm",
        )


def refuse_shared(heads: HeadTensors, engine: str) -> None:
    """Refuse heads without matrices of their own."""
    if heads.config.layout == "shared":
        raise refuse(
            engine,
            "they share the base's lm_head, but the engine reads one of each head",
            "give --layout full, which writes a copy of it for each head",
        )


def refuse_layers(heads: HeadTensors, engine: str, *, reason: str) -> None:
    """Refuse more than one ResBlock in a head."""
    if heads.config.num_layers > 1:
        raise refuse(
            engine,
            f"they have {heads.config.num_layers} layers each, but {reason}",
            "train with heads.num_layers: 1",
        )


def refuse_deep_or_wide(
    options: ServeOptions, engine: str, *, max_rank: int | None = None, max_nodes: int | None = None
) -> None:
    """Refuse a tree that the engine has no candidates or no room for."""
    tree = options.tree
    if max_rank is not None and tree.num_ranks > max_rank:
        raise InputError(
            f"{engine} lists the {max_rank} most likely tokens of a head (ranks 0 to "
            f"{max_rank - 1}), but the tree has rank {tree.num_ranks - 1}; give a tree from "
            f"medusa-eval tree --top-k {max_rank}"
        )
    if max_nodes is not None and tree.num_nodes > max_nodes:
        raise InputError(
            f"{engine} takes at most {max_nodes} nodes, but the tree has {tree.num_nodes}; give a "
            f"tree from medusa-eval tree --num-nodes {max_nodes}"
        )


def chain_warning(engine: str) -> str:
    """What to expect of an engine that has no trees."""
    return (
        f"{engine} runs only the chain of each head's most likely token, so the acceptance length "
        "to expect is the chain's in the accuracy report, not the tree's"
    )
