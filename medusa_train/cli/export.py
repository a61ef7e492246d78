"""``medusa-train export``, ``import`` and ``verify``: heads in the forms of engines."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.cli.app import Json
from medusa_train.cli.hub import IsDryRun, IsPublic, PushTo, exported
from medusa_train.cli.options import Dtype, TrustRemoteCode


class Target(enum.StrEnum):
    """The engines that load heads."""

    FASTERDECODING = "fasterdecoding"
    TGI = "tgi"
    VLLM = "vllm"
    TENSORRT_LLM = "tensorrt-llm"
    MLC = "mlc"
    NXD = "nxd"
    COMBINED = "combined"
    TRANSFORMERS = "transformers"


class Layout(enum.StrEnum):
    """Where the output matrices are."""

    FULL = "full"
    SHARED = "shared"


TargetArgument = Annotated[Target, typer.Argument(help="The engine.")]
NumHeads = Annotated[
    int | None, typer.Option(min=1, help="Keep the first N heads. Default: all of them.")
]
MinVersion = Annotated[
    str | None,
    typer.Option(
        help="vllm: the oldest version that has to load it, such as 0.25. Default: every version "
        "up to 0.32."
    ),
]


def export(
    target: TargetArgument,
    heads: Annotated[Path, typer.Argument(help="A heads directory, such as RUN/heads.")],
    output: Annotated[Path, typer.Argument(help="The directory to write.")],
    base_model: Annotated[
        str | None,
        typer.Option(help="Hub id or directory of the base. Default: the one the heads name."),
    ] = None,
    tree: Annotated[
        Path | None,
        typer.Option(help="JSON list of paths. Default: the heads' own, else the top-1 chain."),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Length of the chain, for engines without trees. Default: all heads."
        ),
    ] = None,
    num_heads: NumHeads = None,
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="full: copy the base's lm_head into each head; shared: leave equal copies away. "
            "Default: as trained."
        ),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Of the weights; auto is that of the heads' file.")
    ] = Dtype.AUTO,
    min_version: MinVersion = None,
    trust_remote_code: TrustRemoteCode = False,
    push_to_hub: PushTo = None,
    public: IsPublic = False,
    dry_run: IsDryRun = False,
    as_json: Json = False,
) -> None:
    """Write the heads in the form that an engine loads.

    The directory is read back by the engine's own rules, and removed if it would not give the same
    heads. README.md in it has the command that starts the engine. Heads that an engine cannot load
    are refused with its reason. Where the base was trained with the heads, OUTPUT gets two
    directories, base and heads, unless --base-model says where the trained base is.
    """
    from medusa_train.console import warn

    with exported(output, repo=push_to_hub, public=public, dry_run=dry_run) as export:
        from medusa_train.export_options import ExportChoices
        from medusa_train.export_with_base import export_with_base

        result = export_with_base(
            target.value,
            heads,
            export.directory,
            choices=ExportChoices(
                base_model=base_model,
                tree_file=tree,
                dtype=dtype.value,
                num_heads=num_heads,
                layout=layout.value if layout else None,
                num_speculative_tokens=num_speculative_tokens,
                min_version=min_version,
                trust_remote_code=trust_remote_code,
                repo=push_to_hub,
            ),
        )
        for warning in result.warnings:
            warn(warning)
        facts = {"target": target.value, "warnings": list(result.warnings)}
        export.finish(result.files, as_json=as_json, facts=facts)
    if not as_json and not dry_run:
        typer.echo(f"{output}: {len(result.files)} files, read back as {target.value} does")
        typer.echo(f"\n{result.start.strip()}")


def import_heads(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A directory with heads in any engine's form, or OWNER/NAME on the hub.",
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The heads directory to write.")],
    revision: Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of SRC on the hub. Default: main."),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="Hub id or directory of the base. Default: the one the config names."),
    ] = None,
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="full: copy the base's lm_head into each head; shared: leave equal copies away. "
            "Default: what the tensors have."
        ),
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="Read this weights file of SRC alone. Default: all of them.")
    ] = None,
    trust_tensors: Annotated[
        bool,
        typer.Option("--trust-tensors", help="Where config.json says otherwise, take the tensors."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Make a heads directory from heads in any engine's form.

    The form is told from names and shapes. Pickles may hold tensors and nothing else; nothing in
    SRC is run. A repository of the hub is fetched into its cache first.
    """
    from medusa_train.export.fetch import local_directory

    directory = local_directory(source, revision=revision, file=file)

    from medusa_train.importing import import_heads as do_import

    result = do_import(
        directory,
        output,
        base_model=base_model,
        layout=layout.value if layout else None,
        file=file,
        trust_tensors=trust_tensors,
        trust_remote_code=trust_remote_code,
    )
    config = result.config
    if as_json:
        facts = {"output": str(output), "names": result.convention, "files": list(result.files)}
        shape = {"num_heads": config.num_heads, "num_layers": config.num_layers}
        typer.echo(
            json.dumps(
                {**facts, **shape, "layout": config.layout, "base": result.base.name_or_path}
            )
        )
    else:
        typer.echo(
            f"{output}: {config.num_heads} heads of {config.num_layers} layers, layout "
            f"{config.layout}, of {result.base.name_or_path}; from {', '.join(result.files)}"
        )


def verify(
    target: TargetArgument,
    directory: Annotated[Path, typer.Argument(help="A directory with heads, made anywhere.")],
    heads: Annotated[
        Path | None,
        typer.Option(help="A heads directory: its logits have to be those of the engine."),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="Hub id or directory of the base: its vocabulary has to fit."),
    ] = None,
    num_heads: NumHeads = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the chain that will be asked for.")
    ] = None,
    min_version: MinVersion = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Say what an engine would do with a directory, by that engine's own rules.

    Names, counts, defaults, biases, vocabulary rows and the choice of files are checked, and what
    the engine would do without a word is said. Nothing in the directory is run. Exit code 1 if the
    heads would not work as they are.
    """
    from medusa_train.verifying import verify_directory

    result = verify_directory(
        target.value,
        directory,
        heads=heads,
        base_model=base_model,
        num_heads=num_heads,
        num_speculative_tokens=num_speculative_tokens,
        min_version=min_version,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "engine": result.engine,
                    "ok": result.is_good,
                    "files": list(result.files),
                    "num_heads": result.num_heads,
                    "num_layers": result.num_layers,
                    "logits_compared": result.is_compared,
                    "findings": [{"severity": f.severity, "text": f.text} for f in result.findings],
                },
                ensure_ascii=False,
            )
        )
    else:
        for finding in result.findings:
            typer.echo(f"{finding.severity}: {finding.text}")
        compared = ", the logits are those of the heads" if result.is_compared else ""
        shape = f"{result.num_heads} heads of {result.num_layers} layers"
        outcome = f"loads {shape}{compared}" if result.is_good else "does not load these heads"
        typer.echo(f"{directory}: {result.engine} {outcome}")
    if not result.is_good:
        raise typer.Exit(1)
