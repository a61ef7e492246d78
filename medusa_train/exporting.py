"""From heads and their base model to what an engine loads, checked by reading it back."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from medusa_train.base_facts import BaseFacts, check_shape, read_facts, read_lm_head, read_tokenizer
from medusa_train.base_model.fingerprint import base_fingerprint, model_file, weight_files
from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.export import combined, fasterdecoding, mlc, nxd, tensorrt_llm, tgi, vllm
from medusa_train.export.loaders.view import Request
from medusa_train.export.refusals import refuse
from medusa_train.export.source import (
    HeadTensors,
    ServeOptions,
    Written,
    as_layout,
    cast,
    folded,
    read_heads,
)
from medusa_train.export.transformers import export_transformers
from medusa_train.export.verify import Target, Verification, verify
from medusa_train.export_card import write_export_card
from medusa_train.export_options import (
    ExportChoices,
    check_choices,
    serve_options,
    verified_tokens,
)
from medusa_train.heads.config import BaseIdentity
from medusa_train.run_dir import atomic_directory, check_writable

_BESIDE_BASE = frozenset({"nxd", "transformers"})


@dataclass(frozen=True)
class Exported:
    """An export that was read back without an error.

    Attributes:
        output: its directory.
        files: that were written, by name.
        start: how to start the engine, in Markdown.
        warnings: what its user should know.
        verification: what the engine does with it.
    """

    output: Path
    files: tuple[str, ...]
    start: str
    warnings: tuple[str, ...]
    verification: Verification


def export_heads(
    target: Target, heads: Path, output: Path, *, choices: ExportChoices | None = None
) -> Exported:
    """What ``medusa-train export`` does.

    Args:
        target: the engine.
        heads: a heads directory.
        output: a new or empty directory; for ``nxd`` and ``transformers`` also a copy of the base.
        choices: what the user chose.

    Returns:
        What was written.

    Raises:
        InputError: no heads or base, another base, heads that the engine cannot load (with its
            reason), a tree that the heads cannot fill, or an export is there.
        MedusaTrainError: read back, the export is not what was exported; it is removed.
    """
    chosen = choices or ExportChoices()
    check_choices(target, chosen)
    _check_output(target, output)
    source, options, facts = _prepare(target, heads, output, chosen)
    with _output_directory(target, output) as directory:
        before = _files(directory)
        written = _write(target, source, directory, options, facts)
        warnings = (*written.warnings, *_logit_warnings(source), *_code_warnings(facts))
        write_export_card(
            target,
            heads,
            directory,
            output=output,
            chosen=chosen,
            start=written.start,
            notes=warnings,
            holds_base=target == "combined" or _is_beside_base(target, directory),
        )
        request = Request(
            directory,
            str(output),
            num_speculative_tokens=verified_tokens(target, options),
            version=options.min_version,
            base_config=facts.config,
        )
        verification = verify(target, request, heads=source)
        if not verification.is_good:
            raise MedusaTrainError(
                f"{output}: not exported: read back as {verification.engine} does, "
                f"{'; '.join(verification.errors)}; please report it"
            )
        files = tuple(sorted(_files(directory) - before))
    return Exported(output, files, written.start, warnings, verification)


def check_export(target: Target, heads: Path, output: Path, chosen: ExportChoices) -> None:
    """Say what an engine cannot load before the base that the heads name is made.

    Raises:
        InputError: the engine's reason.
    """
    check_choices(target, chosen)
    source = read_heads(heads, num_heads=chosen.num_heads)
    facts = read_facts(source.base, trust_remote_code=chosen.trust_remote_code)
    options = serve_options(target, source, heads=heads, output=output, chosen=chosen)
    config = replace(source.config, layout=chosen.layout or source.config.layout)
    kind = str(facts.config["model_type"])
    _check(target, replace(source, config=config, model_type=kind), options)


def _prepare(
    target: Target, heads: Path, output: Path, chosen: ExportChoices
) -> tuple[HeadTensors, ServeOptions, BaseFacts]:
    """The heads as they will be written, or the engine's reason why they cannot be."""
    source = read_heads(heads, num_heads=chosen.num_heads)
    facts = _facts(heads, source, output, chosen)
    options = serve_options(target, source, heads=heads, output=output, chosen=chosen)
    source = replace(source, model_type=str(facts.config["model_type"]))
    if source.base.trained is not None:
        name = str(output) if target == "combined" else facts.name_or_path
        base = replace(source.base, name_or_path=name, revision=None, trained=None)
        source = replace(source, base=base)
    if chosen.layout not in {None, source.config.layout}:
        source = as_layout(source, chosen.layout, lm_head=_lm_head(heads, source.base, facts))
    _check(target, source, options)
    if target == "vllm" and source.config.layout == "shared":
        source = replace(source, lm_head=_lm_head(heads, source.base, facts))
    rule = facts.logit_rule
    if target != "transformers":  # its decoder looks at the order of the logits alone
        source = folded(source, scale=rule.scale, soft_cap=rule.soft_cap)
    return cast(source, chosen.dtype), options, facts


def _write(
    target: Target, source: HeadTensors, directory: Path, options: ServeOptions, facts: BaseFacts
) -> Written:
    match target:
        case "fasterdecoding":
            return fasterdecoding.write(source, directory, options)
        case "tgi":
            return tgi.write(source, directory, options)
        case "vllm":
            return vllm.write(source, directory, options)
        case "tensorrt-llm":
            return tensorrt_llm.write(source, directory, options)
        case "mlc":
            return mlc.write(source, directory, options)
        case "nxd":
            return nxd.write(source, directory, options)
        case "combined":
            return _write_combined(source, directory, options, facts)
        case "transformers":
            num_tokens = len(read_tokenizer(facts))
            return export_transformers(source, directory, options, num_tokens=num_tokens)


def _write_combined(
    source: HeadTensors, directory: Path, options: ServeOptions, facts: BaseFacts
) -> Written:
    name, revision = facts.name_or_path, facts.revision
    config = model_file(name, "config.json", revision=revision)
    if facts.has_own_code:
        raise refuse(
            "combined",
            f"{name} comes with code of its own, which the engine does not run",
            "decode with export transformers",
        )
    if config is None or facts.gguf_file is not None:
        raise InputError(
            f"{name}: combined copies the base's safetensors files, and it has none; save it as "
            "safetensors first"
        )
    written = combined.write(
        source,
        directory,
        options,
        base_config=config,
        base_weights=weight_files(name, revision=revision),
    )
    read_tokenizer(facts).save_pretrained(directory)
    generation = model_file(name, "generation_config.json", revision=revision)
    if generation is not None:
        shutil.copyfile(generation, directory / generation.name)
    return written


def _check(target: Target, source: HeadTensors, options: ServeOptions) -> None:
    match target:
        case "fasterdecoding":
            fasterdecoding.check(source, options)
        case "tgi":
            tgi.check(source, options)
        case "vllm":
            vllm.check(source, options)
        case "tensorrt-llm":
            tensorrt_llm.check(source, options)
        case "mlc":
            mlc.check(source, options)
        case "nxd":
            nxd.check(source, options)
        case "combined":
            combined.check(source, options)
        case "transformers":
            pass  # our own decoder loads all heads


def _check_output(target: Target, output: Path) -> None:
    there = output.is_dir() and any(output.iterdir())
    is_base = there and _is_beside_base(target, output)
    names = {"nxd": (nxd.WEIGHTS_FILE,), "transformers": ("custom_generate", "heads_spec.json")}
    for name in names.get(target, ()):
        if (output / name).exists():
            raise InputError(
                f"{output / name}: is there already; give another directory or remove it"
            )
    if (there and not is_base) or (output.exists() and not output.is_dir()):
        raise InputError(f"{output}: is there already; give another directory or remove it")
    check_writable(output.parent)


def _facts(heads: Path, source: HeadTensors, output: Path, chosen: ExportChoices) -> BaseFacts:
    if source.base.trained is not None and chosen.base_model is None:
        raise InputError(
            f"{heads}: heads of a base model that was trained with them; give the trained base "
            "that medusa-train merge wrote (--base-model)"
        )
    facts = read_facts(
        source.base,
        base_model=chosen.base_model,
        trust_remote_code=chosen.trust_remote_code,
    )
    check_shape(facts, source.config, where=heads)
    # The base that the heads name may be there without weights; others have to be its copies.
    in_output = str(output) if (output / "config.json").exists() else None
    for model in (chosen.base_model, in_output):
        if model is not None:
            gguf_file = source.base.gguf_file if model == source.base.name_or_path else None
            found = base_fingerprint(model, gguf_file=gguf_file)
            _check_base(heads, source.base, model, found)
    return facts


def _check_base(heads: Path, identity: BaseIdentity, model: str, found: str) -> None:
    if found != identity.fingerprint:
        raise InputError(
            f"{heads}: heads of the base model {identity.name_or_path} with fingerprint "
            f"{identity.fingerprint}, but {model} has {found}; give the base that they were "
            "trained on, or a copy of its files"
        )


def _lm_head(heads: Path, identity: BaseIdentity, facts: BaseFacts) -> Tensor:
    _check_base(heads, identity, facts.name_or_path, facts.fingerprint())
    return read_lm_head(facts)


def _logit_warnings(source: HeadTensors) -> Iterator[str]:
    if source.soft_cap is not None:
        yield (
            f"the base soft-caps its logits at {source.soft_cap:g} and the exported heads do not: "
            "the order of the tokens, which alone decides, is the same"
        )
    if source.logit_scale != 1.0:
        yield f"the base's logit scale of {source.logit_scale:g} is in the exported matrices"


def _code_warnings(facts: BaseFacts) -> Iterator[str]:
    if facts.has_own_code:
        yield (
            "the base comes with code of its own: what loads it runs that only where it is told "
            "to, most often with trust_remote_code"
        )


@contextmanager
def _output_directory(target: Target, output: Path) -> Iterator[Path]:
    """Where to write: a directory that takes its place at the end, or the base's, cleaned up."""
    if not _is_beside_base(target, output):
        with atomic_directory(output) as temporary:
            yield temporary
        return
    before = _files(output)
    try:
        yield output
    except BaseException:
        for name in _files(output) - before:
            (output / name).unlink()
        shutil.rmtree(output / "custom_generate", ignore_errors=True)
        raise


def _is_beside_base(target: Target, directory: Path) -> bool:
    return target in _BESIDE_BASE and (directory / "config.json").exists()


def _files(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}
