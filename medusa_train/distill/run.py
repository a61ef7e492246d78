"""One generation: units of prompts to a data set directory, resumable at any moment.

Float results depend on the batch's shape, so in process the unit of work is a block of prompts,
whose schedule and random numbers depend on the block alone; with servers it is one prompt. A
finished unit is a record in a journal; an unfinished one is written again. So an interrupted run,
a straight one, and one that many machines share give the same bytes.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from medusa_train.console import ProgressReporter, log, progress
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import MANIFEST_FILE, read_manifest
from medusa_train.data.teacher_logprobs import num_bytes
from medusa_train.distill import filters
from medusa_train.distill.assemble import Assembly, listed, say
from medusa_train.distill.dialogues import Origin
from medusa_train.distill.journal import Journal, Unit
from medusa_train.distill.openings import Openings
from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.unit import Work, write_unit
from medusa_train.distill.writer import Writer
from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.interrupts import Interrupt, interruptible
from medusa_train.json_values import read_json
from medusa_train.run_dir import check_writable, locked, write_json

WORK = "generation"
PLAN_FILE = "plan.json"
JOURNAL_FILE = "journal.jsonl"
# Below this share of usable prompts the model or its template is not fit to write them.
MIN_YIELD = 0.05
# Prompts after which that share is looked at.
YIELD_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a generation one process does: the units n with n % num == index."""

    index: int
    num: int


def run_distill(
    writer: Writer,
    chat: ChatTokenizer,
    *,
    base_model: str,
    base_fingerprint: str,
    settings: DistillSettings,
    output: Path,
    shard: Shard | None = None,
    max_failed: float = 0.0,
) -> dict[str, Any]:
    """Generate a data set, or go on with one.

    Args:
        writer: who answers.
        chat: the base model's tokenizer and template.
        base_model: the base model, as the user names it.
        base_fingerprint: of its files.
        settings: what to generate.
        output: directory of the data set; holds ``generation/`` until it is complete.
        shard: do a part; ``merge`` puts the parts together.
        max_failed: the share of prompts that may stay without an answer.

    Returns:
        The data set's manifest; of a shard, its plan with the number of units.

    Raises:
        InputError: another generation lies in ``output``; a source of prompts that cannot be read.
        MedusaTrainError: the model writes next to no usable prompts; prompts have no answer; the
            disk is full.
    """
    check_writable(output)
    with (
        locked(output),
        Openings(settings, has_template=chat.has_template, scratch=output) as openings,
    ):
        origin = Origin(
            base_fingerprint, settings.row_sampling(), [settings.turns, settings.write_user_turns]
        )
        work = Work(writer, chat, settings, origin, filters.AnswerFilter(settings, chat=chat))
        plan = _plan(work, openings, base_model=base_model)
        if (output / MANIFEST_FILE).exists():
            manifest = read_manifest(output)
            check_same(manifest, plan, output)
            if shard is not None:
                raise InputError(
                    f"{output}: holds the whole of this generation, not "
                    f"{_shard_name(asdict(shard))}; give another directory"
                )
            if manifest["num_missing_units"]:
                raise InputError(
                    f"{output}: holds what was merged before {manifest['num_missing_units']} of "
                    f"{plan['num_units']} units were finished; go on in the directory of that "
                    "generation, or remove this one"
                )
            if not manifest["num_failed"]:
                # A kill may have come between the data set and this.
                shutil.rmtree(output / WORK, ignore_errors=True)
                return manifest
        if chat.has_template:
            chat.template.check_user_turn()
        else:
            _check_plain(settings)
        _announce(work, openings, plan)
        generation = _Generation(work, openings, plan=plan, shard=shard, output=output)
        generation.run()
        if shard is not None:
            return {**plan, **generation.shard_done(shard)}
        return _finish(output, plan, max_failed=max_failed)


def _check_plain(settings: DistillSettings) -> None:
    """Refuse what only chats have; a model without a template would do it silently without."""
    wanted = [
        name
        for name, is_set in (
            ("system_prompt", settings.system_prompt is not None),
            ("turns", settings.turns > 1),
            ("write_user_turns", settings.write_user_turns),
        )
        if is_set
    ]
    if wanted:
        raise InputError(
            f"data.distill.{wanted[0]}: is for chats, and the base model's tokenizer has no chat "
            "template; give one (data.chat_template), or leave it out"
        )


def _finish(output: Path, plan: dict[str, Any], *, max_failed: float) -> dict[str, Any]:
    with Journal(output / WORK / JOURNAL_FILE) as journal:
        manifest = Assembly([journal], plan=plan).write(output)
    say(manifest, output=output)
    num_failed = sum(manifest["num_failed"].values())
    if num_failed:
        if num_failed > max_failed * manifest["num_prompts"]:
            raise MedusaTrainError(
                f"{output}: {num_failed} of {manifest['num_prompts']} prompts have no answer; the "
                "others are kept: run the same command again to ask them again"
            )
    else:
        shutil.rmtree(output / WORK)
    return manifest


class _Generation:
    """The work that one process does."""

    def __init__(
        self,
        work: Work,
        openings: Openings,
        *,
        plan: dict[str, Any],
        shard: Shard | None,
        output: Path,
    ) -> None:
        self.work = work
        self.openings = openings
        self.shard = shard
        self.output = output
        every, first = (1, 0) if shard is None else (shard.num, shard.index)
        self.units = range(first, plan["num_units"], every)
        self.size: int = plan["unit_size"]
        self._begin_plan({**plan, "shard": None if shard is None else asdict(shard)})
        self._tokens = 0
        self._begin = time.monotonic()

    def run(self) -> None:
        """Write the units that are not there yet."""
        with (
            Journal(self.output / WORK / JOURNAL_FILE, writable=True) as journal,
            interruptible() as interrupt,
        ):
            finished = journal.finished
            missing = [unit for unit in self.units if unit not in finished]
            num_prompts = sum(map(self._num_prompts, self.units))
            done = num_prompts - sum(map(self._num_prompts, missing))
            if done:
                log(f"distill: going on, {done} of {num_prompts} prompts are done")
            with progress("distill", num_prompts, done=done) as bar:
                self._begin = time.monotonic()
                for unit in self._written(missing, bar, interrupt):
                    journal.append(unit)
                    bar.update(self._num_prompts(unit.number), detail=self._rate())
                    self._check_yield(journal)
            left = len(missing) - len(journal.finished - finished)
            if interrupt.is_asked and left:
                log(
                    f"interrupted: {len(self.units) - left} of {len(self.units)} units are "
                    "finished and kept; run the same command again to go on"
                )
                raise KeyboardInterrupt

    def shard_done(self, shard: Shard) -> dict[str, Any]:
        """Say that a shard is complete."""
        with Journal(self.output / WORK / JOURNAL_FILE) as journal:
            num_rows, num_failed = journal.num_rows, len(journal.failed)
        if num_failed:
            raise MedusaTrainError(
                f"{self.output}: {num_failed} units have prompts without an answer; the others are "
                "kept: run the same command again to ask them again"
            )
        log(
            f"distill: shard {shard.index}/{shard.num} is complete: {num_rows} conversations "
            "before duplicates are left out; put all shards together with medusa-distill merge"
        )
        return {"shard": asdict(shard), "num_conversations": num_rows}

    def _begin_plan(self, plan: dict[str, Any]) -> None:
        path = self.output / WORK / PLAN_FILE
        if path.exists():
            known = read_plan(path)
            check_same(known, plan, self.output)
            if known["shard"] != plan["shard"]:
                raise InputError(
                    f"{self.output}: holds {_shard_name(known['shard'])} of this generation, not "
                    f"{_shard_name(plan['shard'])}; give another directory"
                )
        write_json(path, plan)

    def _num_prompts(self, unit: int) -> int:
        return min(self.size, len(self.openings) - unit * self.size)

    def _written(
        self, missing: list[int], bar: ProgressReporter, interrupt: Interrupt
    ) -> Iterator[Unit]:
        """The units as they are finished; none is begun once an end is asked for."""
        lock = threading.Lock()

        def on_tokens(num_tokens: int) -> None:
            with lock:
                self._tokens += num_tokens
                bar.update(0, detail=self._rate())

        def write(number: int) -> Unit:
            first = number * self.size
            openings = list(self.openings.between(first, first + self.size))
            return write_unit(number, openings, work=self.work, on_tokens=on_tokens)

        numbers = iter(missing)
        if self.work.writer.num_workers == 1:
            for number in numbers:
                if interrupt.is_asked:
                    return
                yield write(number)
            return
        yield from self._written_at_once(write, numbers, interrupt)

    def _written_at_once(
        self, write: Callable[[int], Unit], numbers: Iterator[int], interrupt: Interrupt
    ) -> Iterator[Unit]:
        num_workers = self.work.writer.num_workers
        with ThreadPoolExecutor(num_workers) as pool:
            running: set[Future[Unit]] = set()
            try:
                while True:
                    wanted = 0 if interrupt.is_asked else num_workers - len(running)
                    running |= {pool.submit(write, n) for n in islice(numbers, wanted)}
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            except BaseException:
                self.work.writer.stop()
                raise

    def _rate(self) -> str:
        rate = self._tokens / max(time.monotonic() - self._begin, 1e-9)
        return f"prompts, {rate:,.0f} tokens/s"

    def _check_yield(self, journal: Journal) -> None:
        """Stop where the model does not write user turns, before that costs hours."""
        drawn, usable = journal.num_drawn, journal.num_usable
        if drawn >= min(YIELD_PROMPTS, len(self.openings)) and usable < MIN_YIELD * drawn:
            raise MedusaTrainError(
                f"{usable} of {drawn} prompts that the model wrote were usable "
                f"({listed(journal.dropped)}); give a file of prompts "
                "(data.distill.prompts), or another chat template"
            )


def _plan(work: Work, openings: Openings, *, base_model: str) -> dict[str, Any]:
    """What a generation is; the same in every process that has a part in it."""
    settings = asdict(work.settings)
    settings["sources"] = openings.identity()
    chat, writer = work.chat, work.writer
    teacher = writer.teacher
    size = writer.unit_size
    plan = {
        "base_model": base_model,
        "base_fingerprint": work.origin.base_fingerprint,
        "tokenizer_hash": chat.tokenizer_hash,
        "stop_ids": sorted(chat.stop_ids),
        "chat_template_hash": chat.chat_template_hash,
        "chat_template_kwargs": chat.chat_template_kwargs,
        "source": " + ".join(openings.sizes),
        "sources": openings.sizes,
        "sampling": work.settings.row_sampling(),
        "seed": work.settings.seed,
        "num_prompts": len(openings),
        "unit_size": size,
        "num_units": -(-len(openings) // size),
        "generation": {
            "base_fingerprint": work.origin.base_fingerprint,
            "chat_template_hash": chat.chat_template_hash,
            "chat_template_kwargs": chat.chat_template_kwargs,
            "settings": settings,
            "writer": writer.identity(),
            "teacher": None if teacher is None else asdict(teacher),
        },
    }
    # As it will be read from a file: tuples are lists there.
    as_read: dict[str, Any] = json.loads(json.dumps(plan))
    return as_read


def _announce(work: Work, openings: Openings, plan: dict[str, Any]) -> None:
    if len(openings.sizes) > 1:
        parts = ", ".join(f"{count} {name}" for name, count in openings.sizes.items())
        log(f"distill: {plan['num_prompts']} prompts: {parts}")
    teacher, settings = work.writer.teacher, work.settings
    if teacher is not None:
        most = plan["num_prompts"] * settings.turns * settings.max_new_tokens
        size = num_bytes(most, teacher.num)
        log(
            f"distill: log-probabilities of {teacher.num} tokens at each token: at most "
            f"{size / 1e6:,.0f} MB on the disk, a third more until the data set is put together"
        )


def read_plan(path: Path) -> dict[str, Any]:
    """Read what a generation is.

    Raises:
        InputError: the file was not written by a generation, or is damaged.
    """
    plan = read_json(path)
    keys = {"generation", "num_units", "num_prompts", "shard"}
    if not isinstance(plan, dict) or not keys <= plan.keys() or not _is_identity(plan):
        raise InputError(f"{path}: not the plan of a generation; give another directory")
    return plan


def _is_identity(plan: dict[str, Any]) -> bool:
    generation = plan["generation"]
    return isinstance(generation, dict) and isinstance(generation.get("settings"), dict)


def check_same(
    known: Mapping[str, Any],
    mine: Mapping[str, Any],
    output: Path,
    *,
    advice: str = "give another directory, or remove this one",
) -> None:
    """Raise :class:`InputError` unless ``known`` is a plan of this very generation.

    Older plans do not say where answers end.
    """
    before, now = known.get("generation"), mine["generation"]
    old, new = _flat(before if isinstance(before, dict) else {}), _flat(now)
    for name in ("tokenizer_hash", "stop_ids"):
        if name in known and name in mine:
            old[name], new[name] = known[name], mine[name]
    if old == new:
        return
    names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    changed = ", ".join(f"{n} {old.get(n)!r} → {new.get(n)!r}" for n in names)
    raise InputError(f"{output}: holds another generation ({changed}); {advice}")


def _flat(identity: dict[str, Any]) -> dict[str, Any]:
    nested = {name for name in ("settings", "writer") if isinstance(identity.get(name), dict)}
    flat = {name: value for name, value in identity.items() if name not in nested}
    for name in nested:
        flat.update(identity[name])
    return flat


def _shard_name(shard: dict[str, Any] | None) -> str:
    return "the whole" if shard is None else f"shard {shard['index']}/{shard['num']}"
