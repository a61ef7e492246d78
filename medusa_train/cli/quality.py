"""``medusa-eval quality``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.cli.app import Json
from medusa_train.cli.options import BootstrapSeed, MaxNewTokens, NumBootstrap, Template, finite
from medusa_train.errors import InputError
from medusa_train.limits import MAX_CONCURRENCY


def quality(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run directory whose recipe changes the base model. Without one: --model and "
            "--base-model."
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            help="Hub id or directory of the original. Default: the one that the run or the "
            "adapters name."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the changed model, or of adapters that peft reads. Default: "
            "RUN/adapters, else RUN/base."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A data set directory, or a ShareGPT, messages or text file. Default: what the "
            "run held out."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, as for a generation: rows with turns, messages or text. The text is "
            "then the original's greedy answers to the first user turns."
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="The first so many of --prompts. Default: all.")
    ] = None,
    num_answers: Annotated[
        int,
        typer.Option(min=0, help="Prompts that both models answer, side by side; 0 is none."),
    ] = 20,
    max_new_tokens: MaxNewTokens = 192,
    chat_template: Template = None,
    min_agreement: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, callback=finite, help="Greedy agreement that the verdict wants."
        ),
    ] = 0.98,
    max_perplexity_ratio: Annotated[
        float,
        typer.Option(min=0.0, callback=finite, help="Perplexity ratio that the verdict allows."),
    ] = 1.02,
    judge_url: Annotated[
        str | None,
        typer.Option(
            help="Base URL of an OpenAI-compatible server whose model judges the answers, such as "
            "http://host:8000/v1."
        ),
    ] = None,
    judge_model: Annotated[
        str | None, typer.Option(help="Name of the judge's model at the server.")
    ] = None,
    judge_api_key_env: Annotated[
        str,
        typer.Option(help="Environment variable that holds the server's key, if it wants one."),
    ] = "OPENAI_API_KEY",
    judge_concurrency: Annotated[
        int, typer.Option(min=1, max=MAX_CONCURRENCY, help="Requests to the judge at a time.")
    ] = 4,
    lm_eval: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK",
            help="Also run this task of lm-eval on both models, by name or YAML file; may be given "
            "many times. Needs the package lm_eval.",
        ),
    ] = None,
    lm_eval_limit: Annotated[
        int | None, typer.Option(min=1, help="The first so many samples of each task.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the report (JSON, Markdown, HTML, PNG) here."),
    ] = None,
    num_bootstrap: NumBootstrap = 1000,
    seed: BootstrapSeed = 0,
    as_json: Json = False,
) -> None:
    """Say how far training has moved a base model: KL, perplexity, agreement, answers."""
    if num_prompts is not None and prompts is None:
        raise InputError("--num-prompts: is for --prompts; give a file, or leave it out")
    if (judge_url is None) != (judge_model is None):
        raise InputError("--judge-url and --judge-model: give both, or leave both out")
    if judge_url is not None and not num_answers:
        raise InputError("--judge-url: judges answers; give --num-answers above 0")
    from medusa_train.evaluate.quality_report import quality_summary
    from medusa_train.quality.judge import JudgeOptions
    from medusa_train.quality.measure import measure_quality
    from medusa_train.quality.options import QualityOptions

    judge = None
    if judge_url is not None and judge_model is not None:
        judge = JudgeOptions(
            url=judge_url,
            model=judge_model,
            api_key_env=judge_api_key_env,
            concurrency=judge_concurrency,
        )
    report = measure_quality(
        run,
        options=QualityOptions(
            base_model=base_model,
            model=model,
            data=data,
            prompts=prompts,
            chat_template=chat_template,
            num_prompts=num_prompts,
            num_answers=num_answers,
            max_new_tokens=max_new_tokens,
            min_agreement=min_agreement,
            max_perplexity_ratio=max_perplexity_ratio,
            judge=judge,
            lm_eval=tuple(lm_eval or ()),
            lm_eval_limit=lm_eval_limit,
            num_bootstrap=num_bootstrap,
            seed=seed,
            output=output,
        ),
    )
    typer.echo(json.dumps(report) if as_json else quality_summary(report))
