"""The training curves of runs, finished or still running, as pictures and one page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.errors import InputError
from medusa_train.page.drawing import Plot
from medusa_train.page.frame import facts_list, headline, paragraph, pictures, table, whole_page
from medusa_train.page.training import LoggedRun, comparison_plots, head_plots, run_plots
from medusa_train.run_dir import RunDir, atomic_path, write_text

ABSENT = "–"


@dataclass(frozen=True, slots=True)
class WrittenCurves:
    """What was written, and of how much.

    Attributes:
        page: the HTML page.
        pictures: the PNG files.
        steps: the last step that each run has logged, by the run's name.
    """

    page: Path
    pictures: tuple[Path, ...]
    steps: dict[str, int]


def plot_runs(directories: Sequence[Path], *, output: Path | None = None) -> WrittenCurves:
    """Draw the curves of one run, or of several together.

    Args:
        directories: run directories.
        output: where the files go; None is ``report/`` of the first run.

    Raises:
        InputError: a directory that is no run, or has logged nothing yet.
    """
    names = _names(directories)
    runs = [LoggedRun(n, read_metrics(d)) for n, d in zip(names, directories, strict=True)]
    target = RunDir(directories[0]).report if output is None else output
    if len(runs) == 1:
        plots = [*head_plots(runs[0]), *run_plots(runs)]
        name, html = "training", _page_of_one(runs[0], directories[0], plots)
    else:
        plots = comparison_plots(runs)
        name, html = "comparison", _page_of_several(runs, directories, plots)
    # Where an older page had more to draw, its picture would look like this one's.
    drawn = {f"{plot.name}.png" for plot in plots}
    for path in target.glob(f"{name}_*.png"):
        if path.name not in drawn:
            path.unlink()
    files = []
    for plot in plots:
        files.append(target / f"{plot.name}.png")
        with atomic_path(files[-1]) as temporary:
            temporary.write_bytes(plot.png)
    page = target / f"{name}.html"
    write_text(page, html)
    return WrittenCurves(page, tuple(files), {run.name: _last_step(run) for run in runs})


def read_metrics(run: Path) -> list[dict[str, float]]:
    """What a run has logged: one line per step, ascending.

    A last line that is cut short is left out: the run may be writing it. A run that went on from a
    checkpoint logs some steps again, and the last it said of a step holds.

    Raises:
        InputError: no run directory, nothing logged yet, or no file of metrics.
    """
    files = RunDir(run)
    if not run.is_dir():
        raise InputError(f"{run}: not a run directory: there is no directory of this name")
    if not (files.metrics.exists() or files.manifest.exists()):
        raise InputError(
            f"{run}: not a run directory: it has no manifest.json and no metrics.jsonl; give what "
            "the recipe calls run_dir"
        )
    steps: dict[int, dict[str, float]] = {}
    for line in _parsed(files.metrics) if files.metrics.exists() else []:
        step = int(line["step"])
        if steps and step < max(steps):
            steps = {known: figures for known, figures in steps.items() if known < step}
        steps.setdefault(step, {}).update(line)
    lines = [steps[step] for step in sorted(steps)]
    if not any("loss" in line or "eval_head1_loss" in line for line in lines):
        raise InputError(
            f"{run}: no metrics yet; training logs its first line after "
            "train.trainer.logging_steps steps"
        )
    return lines


def _parsed(path: Path) -> list[dict[str, float]]:
    """The figures of each line."""
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(texts):
                break
            raise InputError(f"{path}:{number}: not a line of metrics: {error}") from error
        if not (isinstance(line, dict) and isinstance(line.get("step"), int)):
            raise InputError(f"{path}:{number}: not a line of metrics: it has no step")
        lines.append({k: v for k, v in line.items() if isinstance(v, int | float)})
    return lines


def _names(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart.

    Raises:
        InputError: a run that is there twice.
    """
    paths = [directory.resolve() for directory in directories]
    if len(set(paths)) < len(paths):
        twice = next(d for d, p in zip(directories, paths, strict=True) if paths.count(p) > 1)
        raise InputError(f"{twice}: given twice; give each run once")
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _page_of_one(run: LoggedRun, directory: Path, plots: Sequence[Plot]) -> str:
    best = _last(run, "eval_acceptance_length")
    figures = [
        (f"{_last_step(run):,}", "optimizer steps logged"),
        (
            _number(_last(run, "loss")),
            f"weighted loss of {'base and' if 'lambda0' in run.names() else 'all'} heads, at the "
            "last log",
        ),
    ]
    if (moved := _last(run, "eval_base_kl")) is not None:
        figures.append((_number(moved), "nats per token from the original base, held-out text"))
    if best is not None:
        figures.append((_number(best), "tokens per step with the top-1 chain, held-out text"))
    speed, memory = _last(run, "positions_per_second"), _last(run, "memory_mib")
    facts = {"run": str(directory)}
    if (epoch := _last(run, "epoch")) is not None:
        facts["epochs"] = f"{epoch:.2f}"
    if speed is not None:
        facts["speed"] = f"{speed:,.0f} positions per second"
    if memory is not None:
        facts["memory"] = f"{memory:,.0f} MiB"
    body = [
        paragraph("curves of a run of medusa-train, from its metrics.jsonl"),
        headline(figures),
        facts_list(facts),
        "<h2>The last figures of each head</h2>",
        table(*_table_of_heads(run)),
        pictures(plots),
    ]
    return whole_page(f"Training of {run.name}", body)


def _table_of_heads(run: LoggedRun) -> tuple[list[str], list[list[str]]]:
    sides = [("", "training"), ("eval_", "held-out")]
    if not any(name.startswith("eval_head") for name in run.names()):
        sides.pop()
    keys = [("loss", "loss"), ("top1", "top-1"), ("top5", "top-5")]
    columns = ["head", *(f"{side} {word}" for _, side in sides for _, word in keys)]
    rows = [
        [
            str(head),
            *(
                _number(_last(run, f"{prefix}head{head}_{key}"))
                for prefix, _ in sides
                for key, _ in keys
            ),
        ]
        for head in range(1, run.num_heads + 1)
    ]
    return columns, rows


def _page_of_several(
    runs: Sequence[LoggedRun], directories: Sequence[Path], plots: Sequence[Plot]
) -> str:
    columns = [
        "run", "steps", "loss", "head 1 top-1", "held-out top-1", "acceptance length",
        "held-out base KL", "positions/s", "MiB",
    ]  # fmt: skip
    rows = [
        [
            run.name,
            f"{_last_step(run):,}",
            _number(_last(run, "loss")),
            _number(_last(run, "head1_top1")),
            _number(_last(run, "eval_head1_top1")),
            _number(_last(run, "eval_acceptance_length")),
            _number(_last(run, "eval_base_kl")),
            _number(_last(run, "positions_per_second"), digits=0),
            _number(_last(run, "memory_mib"), digits=0),
        ]
        for run in runs
    ]
    body = [
        paragraph("curves of several runs of medusa-train, from their metrics.jsonl"),
        facts_list({run.name: str(d) for run, d in zip(runs, directories, strict=True)}),
        "<h2>The last figures of each run</h2>",
        table(columns, rows),
        paragraph("losses of runs with other head_loss_decay or num_heads are not comparable"),
        pictures(plots),
    ]
    return whole_page("Training of several runs", body)


def _last(run: LoggedRun, name: str) -> float | None:
    return next((line[name] for line in reversed(run.lines) if name in line), None)


def _last_step(run: LoggedRun) -> int:
    return int(run.lines[-1]["step"])


def _number(value: float | None, *, digits: int = 3) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def as_dict(written: WrittenCurves) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "page": str(written.page),
        "pictures": [str(path) for path in written.pictures],
        "steps": written.steps,
    }
