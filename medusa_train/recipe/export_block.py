"""What engines cannot load, as far as a recipe tells; said before the heads are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from medusa_train.recipe.schema import HeadsSection

_WITH_SHARED = frozenset({"tgi", "vllm", "transformers"})
_WITH_ONE_LAYER = frozenset({"fasterdecoding", "combined", "nxd"})


def export_mistakes(
    export: Mapping[str, Any], heads: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """Yield the key of ``export`` and what is wrong with it.

    Args:
        export: that section; values of other types are left to other checks.
        heads: the section of the heads.
    """
    targets, repo = export.get("targets"), export.get("push_to_hub")
    if repo is not None and not targets:
        yield "push_to_hub", "is for an export, and there is none; set export.targets"
    if repo is None and export.get("public") is True:
        yield "public", "is for what is sent to the hub; set export.push_to_hub, or remove it"
    if not isinstance(targets, list):
        return
    for target in [t for i, t in enumerate(targets) if t in targets[:i]]:
        yield "targets", f"{target} is there twice"
    count = _value(heads, "num_heads")
    for name in ("num_heads", "num_speculative_tokens"):
        wanted = export.get(name)
        if isinstance(wanted, int) and isinstance(count, int) and wanted > count:
            yield name, f"must be at most heads.num_heads, which is {count}; got {wanted}"
    layout = export.get("layout") or _value(heads, "layout")
    layers, truncated = _value(heads, "num_layers"), heads.get("vocab_size") is not None
    for target in targets:
        reason = _reason(target, layout=layout, num_layers=layers, truncated=truncated)
        if reason is not None:
            yield "targets", f"{target} cannot load these heads: {reason}"


def _reason(target: str, *, layout: str, num_layers: Any, truncated: bool) -> str | None:
    if target == "transformers":
        return None
    if truncated and (target != "vllm" or layout == "full"):
        return (
            "their vocabulary is truncated; write heads.vocab_size: null, or heads.layout: shared "
            "for vllm"
        )
    if layout == "shared" and target not in _WITH_SHARED:
        return "they share the base's lm_head; write export.layout: full"
    many = isinstance(num_layers, int) and num_layers > 1
    if many and (target in _WITH_ONE_LAYER or (target == "tgi" and layout == "shared")):
        return f"they have {num_layers} layers each; write heads.num_layers: 1"
    return None


def _value(heads: Mapping[str, Any], name: str) -> Any:
    return heads.get(name, HeadsSection.model_fields[name].default)
