"""``medusa-eval``: measure trained heads, find their best tree, and write with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_train.cli.app import Json, make_app
from medusa_train.cli.options import (
    BaseName,
    BootstrapSeed,
    Dtype,
    IsCompiled,
    MaxNewTokens,
    NumBootstrap,
    Template,
    TreeFile,
    finite,
    whole_numbers,
)
from medusa_train.cli.quality import quality
from medusa_train.cli.sampling import (
    IsTypical,
    Seed,
    Temperature,
    TopK,
    TopP,
    answer_options,
)
from medusa_train.cli.speed import speedup
from medusa_train.errors import InputError
from medusa_train.host_memory import use_large_pages
from medusa_train.limits import MAX_TREE_NODES

app = make_app("Measure trained Medusa heads, and write with them.", name="medusa-eval")
app.command("speedup")(speedup)
app.command("quality")(quality)


@app.command("heads-accuracy")
def heads_accuracy(
    heads: Annotated[Path, typer.Argument(help="A heads directory, such as RUN/heads.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="A data set directory, or a ShareGPT, messages or text file. Default: what the "
            "run held out."
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="Hub id or directory of the base. Default: the one the heads name."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the base's weights.")] = Dtype.AUTO,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja template or its path, for chats in a file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the report (JSON, Markdown, HTML, PNG) here.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Ranks to report.")] = 10,
    num_bootstrap: NumBootstrap = 1000,
    seed: BootstrapSeed = 0,
    as_json: Json = False,
) -> None:
    """Say exactly how good heads are, on text that they were not trained on."""
    from medusa_train.measure import measure_heads

    report = measure_heads(
        heads,
        data=data,
        base_model=base_model,
        dtype=dtype.value,
        chat_template=chat_template,
        output=output,
        top_k=top_k,
        num_bootstrap=num_bootstrap,
        seed=seed,
    )
    if as_json:
        typer.echo(json.dumps(report))
        return
    from medusa_train.evaluate.report import summary_text

    typer.echo(summary_text(report))


@app.command("tree")
def tree(
    ranks: Annotated[
        Path, typer.Argument(help="ranks.safetensors, or the report or run directory it is in.")
    ],
    num_nodes: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_TREE_NODES, help="Most nodes without the root; on a CPU, rather 16."
        ),
    ] = 63,
    max_depth: Annotated[
        int | None, typer.Option(min=1, help="Use the first so many heads. Default: all.")
    ] = None,
    per_depth: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Most nodes at depths 1, 2, …, such as 10,20,20."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Candidates of each head. Default: all known ranks."),
    ] = None,
    search_fraction: Annotated[
        float,
        typer.Option(
            min=0.01,
            max=0.99,
            callback=finite,
            help="Share of the conversations that is searched; figures are of the others.",
        ),
    ] = 0.5,
    report_on: Annotated[
        Path | None,
        typer.Option(
            metavar="RANKS", help="Search all of RANKS, and give the figures of this text instead."
        ),
    ] = None,
    latency: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Choose the size with the most tokens per second: JSON with the milliseconds of a "
            'step by its number of tokens with the root, {"1": 20.5, "16": 31.0}.',
        ),
    ] = None,
    for_device: Annotated[
        Path | None,
        typer.Option(
            metavar="HEADS",
            help="Choose the size with the most tokens per second on this device: measure the "
            "steps of these heads and their base, or take what was measured before.",
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="With --for-device: hub id or directory of the base."),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="With --for-device: type of the base's weights.")
    ] = Dtype.AUTO,
    measure_again: Annotated[
        bool,
        typer.Option("--measure-again", help="With --for-device: even if it was measured before."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write tree.json, medusa_choices.json and the picture (PNG, SVG) here."),
    ] = None,
    num_bootstrap: NumBootstrap = 1000,
    seed: BootstrapSeed = 0,
    as_json: Json = False,
) -> None:
    """Find the best candidate tree for some heads, from their ranks."""
    limits = whole_numbers(per_depth, option="--per-depth", example="10,20,20")
    _check_device_options(for_device, latency, base_model, dtype, measure_again)
    from medusa_train.console import warn
    from medusa_train.evaluate.tree import check_search, search_tree
    from medusa_train.evaluate.tree_report import (
        find_ranks,
        read_latency,
        tree_summary,
        write_tree,
    )
    from medusa_train.run_dir import check_writable

    if output is not None:
        check_writable(output)
    searched = find_ranks(ranks)
    other = None if report_on is None else find_ranks(report_on)
    check_search(searched, other, max_depth=max_depth, top_k=top_k)
    curve = None if latency is None else read_latency(latency)
    if for_device is not None:
        from medusa_train.step_latency import heads_latency

        curve = heads_latency(
            for_device,
            num_nodes=num_nodes,
            base_model=base_model,
            dtype=dtype.value,
            ranks_of=searched.metadata.get("heads_fingerprint"),
            measure_again=measure_again,
        )
    result = search_tree(
        searched,
        report_on=other,
        num_nodes=num_nodes,
        max_depth=max_depth,
        per_depth=limits,
        top_k=top_k,
        search_fraction=search_fraction,
        latency=curve,
        num_bootstrap=num_bootstrap,
        seed=seed,
    )
    for note in result["notes"]:
        warn(note)
    if output is not None:
        write_tree(result, directory=output)
    typer.echo(json.dumps(result) if as_json else tree_summary(result))


def _check_device_options(
    for_device: Path | None,
    latency: Path | None,
    base_model: str | None,
    dtype: Dtype,
    measure_again: bool,
) -> None:
    if for_device is not None:
        if latency is not None:
            raise InputError("--latency and --for-device: give one of them, not both")
        return
    given = {
        "--base-model": base_model is not None,
        "--dtype": dtype is not Dtype.AUTO,
        "--measure-again": measure_again,
    }
    for name, is_given in given.items():
        if is_given:
            raise InputError(f"{name}: is for measuring; give --for-device HEADS with it")


@app.command("generate")
def generate(
    heads: Annotated[Path, typer.Argument(help="A heads directory, such as RUN/heads.")],
    prompt: Annotated[str, typer.Argument(help="What the user says; - reads standard input.")],
    base_model: BaseName = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the base's weights.")] = Dtype.AUTO,
    tree: TreeFile = None,
    chat_template: Template = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat.")] = False,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    compiled: IsCompiled = False,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Write an answer with the heads: the text on stdout, tokens/s on stderr."""
    from medusa_train.cli.talk import generate as write

    options = answer_options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        is_typical=typical,
        seed=seed,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    model, template = _load(heads, base_model, dtype, tree, chat_template, seed, compiled)
    write(model, text, options=options, raw=raw, chat_template=template, as_json=as_json)


@app.command("chat")
def chat(
    heads: Annotated[Path, typer.Argument(help="A heads directory, such as RUN/heads.")],
    base_model: BaseName = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the base's weights.")] = Dtype.AUTO,
    tree: TreeFile = None,
    chat_template: Template = None,
    system: Annotated[str | None, typer.Option(help="What the system message says.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    typical: IsTypical = False,
    compiled: IsCompiled = False,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Talk with the model. Ctrl-C ends an answer, /exit leaves, /help lists the commands."""
    from medusa_train.cli.talk import chat as talk

    options = answer_options(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        is_typical=typical,
        seed=seed,
    )
    model, template = _load(heads, base_model, dtype, tree, chat_template, seed, compiled)
    talk(model, options=options, chat_template=template, system=system, as_json=as_json)


def _load(
    heads: Path,
    base_model: str | None,
    dtype: Dtype,
    tree: Path | None,
    chat_template: str | None,
    seed: int | None,
    compiled: bool,
) -> tuple[Any, str | None]:
    """The model with its heads, and the chat template's text."""
    import torch

    from medusa_train.medusa_model import MedusaModel, read_tree
    from medusa_train.recipe.load import read_chat_template

    template = read_chat_template(chat_template)
    paths = None if tree is None else read_tree(tree)
    model = MedusaModel.from_pretrained(
        heads, base_model, dtype=dtype.value, tree=paths, compiled=compiled
    )
    if seed is not None:
        torch.manual_seed(seed)
    return model, template


def main() -> None:
    """The console script."""
    # Before anything of torch is loaded.
    use_large_pages()
    app()


if __name__ == "__main__":
    main()
