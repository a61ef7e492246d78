"""Which heads are in a directory, by the names and shapes of its tensors.

Shapes: D hidden, V rows of ``lm_head``, K heads, L layers, N truncated vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from medusa_train.errors import InputError, InputErrors
from medusa_train.export.files import (
    check_count,
    check_values,
    indexed_files,
    read_tensors,
    require_directory,
    tensor_names,
    weight_files,
)

LM_HEAD, TOKEN_MAP = "lm_head", "token_map"
_SHOWN = 4

# Convention → what its names look like, and FasterDecoding's name of the same tensor; ``L`` stands
# for the number of layers, which names of another convention do not tell.
_VLLM = r"(?:medusa_heads\.)?"  # a prefix that vLLM takes away
_OWN = r"(\d+)\.(\d+)\."
_RULES: tuple[tuple[str, re.Pattern[str], str], ...] = tuple(
    (convention, re.compile(f"^{pattern}$"), name)
    for convention, pattern, name in (
        *(
            rule
            for convention, prefix in (
                ("fasterdecoding", _VLLM),
                ("medusa_head", r"medusa_head\."),
                ("nxd", r"medusa_head_"),
            )
            for rule in (
                (convention, prefix + _OWN + r"linear\.(weight|bias)", r"\1.\2.linear.\3"),
                (convention, prefix + _OWN + r"(weight|bias)", r"\1.\2.\3"),
            )
        ),
        ("vllm", _VLLM + r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"\1.\2.linear.\3"),
        ("vllm", _VLLM + r"lm_heads\.(\d+)\.weight", r"\1.L.weight"),
    )
)
_WITH_BLOCKS = {"vllm": {"lm_head.weight": LM_HEAD, TOKEN_MAP: TOKEN_MAP}}
_WITH_BLOCKS["fasterdecoding"] = {TOKEN_MAP: TOKEN_MAP}


@dataclass(frozen=True)
class Recognised:
    """Heads by FasterDecoding's names.

    Attributes:
        convention: ``fasterdecoding``, ``vllm``, ``medusa_head`` (MLC-LLM, or beside a base) or
            ``nxd``.
        files: that they were read from.
        tensors: ``{h}.{l}.linear.weight`` and ``.bias``; with own matrices ``{h}.{L}.weight``; with
            a truncated vocabulary ``token_map``.
        lm_head: a copy of the base's, which shared heads bring along, or None.
        num_heads: K.
        num_layers: L.
        num_others: tensors of a base model in the same files.
        notes: what was done to them, a sentence each.
    """

    convention: str
    files: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    lm_head: Tensor | None
    num_heads: int
    num_layers: int
    num_others: int
    notes: tuple[str, ...] = ()

    @property
    def is_full(self) -> bool:
        """Whether every head has a matrix of its own."""
        return f"0.{self.num_layers}.weight" in self.tensors

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.tensors["0.0.linear.weight"].shape[0]


@dataclass(frozen=True)
class _Candidate:
    """Heads of one convention in one file, or in the shards of one index."""

    convention: str
    files: tuple[str, ...]
    names: Mapping[str, tuple[str, str]]  # FasterDecoding's name → file and its name there
    others: tuple[str, ...]


def recognise(directory: Path, *, file: str | None = None, is_shared: bool = False) -> Recognised:
    """Read the heads of a directory.

    Args:
        directory: made anywhere; nothing in it is run.
        file: read this weights file alone.
        is_shared: the config says ``original_lm_head``: a single matrix is a copy of the base's.

    Raises:
        InputError: there are no heads, several that differ, or what is not safe to read.
        InputErrors: every tensor that is missing, surplus or of a wrong shape.
    """
    require_directory(directory)
    candidates = _candidates(directory, file)
    if not candidates:
        raise InputError(
            f"{directory}: no heads in it: no weights file has names such as "
            "0.0.linear.weight, blocks.0.layers.0.weight, medusa_head.0.0.linear.weight or "
            "medusa_head_0.0.linear.weight"
        )
    found = [_read(directory, candidate, is_shared=is_shared) for candidate in candidates]
    for other in found[1:]:
        _require_equal(directory, found[0], other)
    if len(found) == 1:
        return found[0]
    same = ", ".join(file for one in found for file in one.files)
    return replace(found[0], notes=(*found[0].notes, f"the same heads are in {same}"))


def _candidates(directory: Path, file: str | None) -> list[_Candidate]:
    groups = [[name] for name in weight_files(directory)]
    for index in sorted(path.name for path in directory.glob("*.index.json")):
        shards = indexed_files(directory, index)
        groups = [group for group in groups if group[0] not in shards] + [shards]
    if file is not None:
        groups = [[file]]
    candidates = []
    for group in groups:
        by_file = {name: tensor_names(directory, name) for name in group}
        candidates += list(_classify(by_file, where=directory))
    return candidates


def _classify(by_file: Mapping[str, list[str]], *, where: Path) -> Iterator[_Candidate]:
    found: dict[str, dict[str, tuple[str, str]]] = {}
    others: list[tuple[str, str]] = []
    for file, names in by_file.items():
        for name in names:
            for convention, pattern, new in _RULES:
                if match := pattern.match(name):
                    known = found.setdefault(convention, {})
                    plain = match.expand(new)
                    if plain in known:
                        raise InputError(f"{where / file}: {name}: is there twice")
                    known[plain] = (file, name)
                    break
            else:
                others.append((file, name))
    for convention, known in found.items():
        beside = _WITH_BLOCKS.get(convention, {})
        left = []
        for file, name in others:
            if name.removeprefix("medusa_heads.") in beside:
                known[beside[name.removeprefix("medusa_heads.")]] = (file, name)
            else:
                left.append(name)
        files = tuple(sorted({file for file, _ in known.values()}))
        if left and convention != "medusa_head":
            raise InputError(
                f"{where / files[0]}: {_some(left)}: no tensor of heads by the names of "
                f"{convention}; remove it or choose another file with --file"
            )
        yield _Candidate(convention, files, known, tuple(left))


def _read(directory: Path, candidate: _Candidate, *, is_shared: bool) -> Recognised:
    tensors: dict[str, Tensor] = {}
    for file in candidate.files:
        wanted = {name: new for new, (where, name) in candidate.names.items() if where == file}
        only = "|".join(rf"{re.escape(name)}$" for name in wanted)
        read = read_tensors(directory, file, only=only)
        check_values(read, where=directory / file, integers=[TOKEN_MAP])
        tensors |= {wanted[name]: tensor for name, tensor in read.items()}
    blocks = [m for name in tensors if (m := re.match(r"^(\d+)\.(\d+)\.linear\.", name))]
    if not blocks:
        raise InputError(f"{directory / candidate.files[0]}: heads without a ResBlock")
    num_heads = 1 + max(int(match.group(1)) for match in blocks)
    num_layers = 1 + max(int(match.group(2)) for match in blocks)
    for count in (num_heads, num_layers):
        check_count(count, where=str(directory / candidate.files[0]))
    tensors = {name.replace(".L.", f".{num_layers}."): value for name, value in tensors.items()}
    notes: list[str] = []
    lm_head = _take_lm_head(tensors, num_heads, num_layers, is_shared=is_shared)
    _add_biases(tensors, num_heads, num_layers, notes)
    _check_names(tensors, num_heads, num_layers, where=directory / candidate.files[0])
    return Recognised(
        candidate.convention,
        candidate.files,
        tensors,
        lm_head,
        num_heads,
        num_layers,
        len(candidate.others),
        tuple(notes),
    )


def _take_lm_head(
    tensors: dict[str, Tensor], num_heads: int, num_layers: int, *, is_shared: bool
) -> Tensor | None:
    """The copy of the base's ``lm_head`` that shared heads bring along, taken out of them."""
    if LM_HEAD in tensors:
        return tensors.pop(LM_HEAD)
    own = [h for h in range(num_heads) if f"{h}.{num_layers}.weight" in tensors]
    if is_shared and own == [0]:
        return tensors.pop(f"0.{num_layers}.weight")
    return None


def _add_biases(
    tensors: dict[str, Tensor], num_heads: int, num_layers: int, notes: list[str]
) -> None:
    """Heads without any bias in their ResBlocks get zeros, which is what an engine computes."""
    if any(re.match(r"^\d+\.\d+\.linear\.bias$", name) for name in tensors):
        return
    for head in range(num_heads):
        for layer in range(num_layers):
            weight = tensors.get(f"{head}.{layer}.linear.weight")
            if weight is not None and weight.dim():
                bias = torch.zeros(weight.shape[0], dtype=weight.dtype)
                tensors[f"{head}.{layer}.linear.bias"] = bias
    notes.append("the ResBlocks have no biases; they are zeros here")


def _check_names(
    tensors: Mapping[str, Tensor], num_heads: int, num_layers: int, *, where: Path
) -> None:
    """Raise InputErrors for what is missing, surplus or of another shape."""
    flat = [name for name, t in tensors.items() if t.dim() == 0]
    if flat:
        raise InputError(f"{where}: {_some(flat)}: a single number, which no head has")
    size = next(t.shape[-1] for n, t in sorted(tensors.items()) if n.endswith(".linear.weight"))
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            shapes[f"{head}.{layer}.linear.weight"] = (size, size)
            shapes[f"{head}.{layer}.linear.bias"] = (size,)
    own = [name for name in tensors if re.match(rf"^\d+\.{num_layers}\.(weight|bias)$", name)]
    if own:
        rows = tensors[sorted(own)[-1]].shape[0]
        shapes |= {f"{head}.{num_layers}.weight": (rows, size) for head in range(num_heads)}
        if any(name.endswith(".bias") for name in own):
            shapes |= {f"{head}.{num_layers}.bias": (rows,) for head in range(num_heads)}
    if TOKEN_MAP in tensors:
        shapes[TOKEN_MAP] = (tensors[TOKEN_MAP].numel(),)
    errors = [f"missing tensor {name!r}" for name in shapes.keys() - tensors.keys()]
    errors += [f"surplus tensor {name!r}" for name in tensors.keys() - shapes.keys()]
    for name in shapes.keys() & tensors.keys():
        if tuple(tensors[name].shape) != shapes[name]:
            got, wanted = list(tensors[name].shape), list(shapes[name])
            errors.append(f"{name}: shape {got}, but the others say {wanted}")
    if errors:
        raise InputErrors([f"{where}: {error}" for error in sorted(errors)])


def _require_equal(directory: Path, first: Recognised, other: Recognised) -> None:
    for name in sorted(first.tensors.keys() | other.tensors.keys()):
        one, two = first.tensors.get(name), other.tensors.get(name)
        if one is None or two is None or not torch.equal(one, two):
            raise InputError(
                f"{directory}: {', '.join(first.files)} and {', '.join(other.files)} hold heads "
                f"that differ ({name}); choose one of them with --file"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
