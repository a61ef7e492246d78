"""The finished units of a generation, of one process or of many, to one data set directory."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from medusa_train.console import log
from medusa_train.data.conversations import (
    Conversation,
    read_manifest,
    write_dataset,
)
from medusa_train.data.teacher_logprobs import TEACHER_DIRECTORY, TeacherShardWriter, decode
from medusa_train.distill import filters
from medusa_train.distill.dialogues import prompt_key
from medusa_train.distill.duplicates import PromptFilter
from medusa_train.distill.journal import Failed, Journal, Unit
from medusa_train.distill.openings import MAGPIE
from medusa_train.errors import MedusaTrainError
from medusa_train.run_dir import write_json_lines

FAILURES_FILE = "failures.jsonl"


class Assembly:
    """Reads the units in the order of the prompts, and leaves out what occurs twice.

    Duplicates are found here and not while units are written, so that the data set does not
    depend on which process wrote which unit.

    Args:
        journals: of all processes.
        plan: of the generation, as all of them have it.
    """

    def __init__(self, journals: Sequence[Journal], *, plan: Mapping[str, Any]) -> None:
        self._journals = journals
        self._plan = plan
        settings = plan["generation"]["settings"]
        self._system_prompt: str | None = settings["system_prompt"]
        self._prompts = PromptFilter(near_duplicate=settings["near_duplicate"])
        self._contents: set[bytes] = set()
        self.total = Unit(-1)
        self.num_units = 0
        self.num_duplicates: Counter[str] = Counter()
        self.num_ended = 0
        self.num_answers = 0
        self.num_retokenised = 0

    @property
    def missing(self) -> list[int]:
        """The units that no process has finished; those with failed prompts are not missing."""
        return [
            number
            for number in range(self._plan["num_units"])
            if not any(number in journal for journal in self._journals)
        ]

    def write(self, output: Path) -> dict[str, Any]:
        """Write the data set, and return its manifest.

        Raises:
            MedusaTrainError: there is not one row; the disk is full.
        """
        teacher = self._plan["generation"]["teacher"]
        writer = None
        if teacher is not None:
            writer = TeacherShardWriter(
                output / TEACHER_DIRECTORY, kind=teacher["kind"], num=teacher["num"]
            )
        # The manifest is written last, so that its presence means complete.
        write_dataset(output, self._rows(writer, output), manifest=self._manifest)
        return read_manifest(output)

    def _rows(self, writer: TeacherShardWriter | None, output: Path) -> Iterator[Conversation]:
        num_rows = 0
        for unit in self._units():
            self._count(unit)
            faults: dict[str, str | None] = {}
            teachers = unit.teachers or [""] * len(unit.rows)
            for row, teacher in zip(unit.rows, teachers, strict=True):
                fault = self._fault(row, faults)
                if fault is not None:
                    self.total.dropped[fault] += 1
                    self.num_duplicates[row.source] += 1
                    continue
                if writer is not None:
                    token_ids, logprobs = decode(teacher, num=writer.num)
                    writer.add(row.id, token_ids=token_ids, logprobs=logprobs)
                num_rows += 1
                self._count_row(row)
                yield row
        self._write_failures(output)
        if not num_rows:
            reasons = listed(self.total.dropped + _reasons(self.total.failed))
            see = f"; see {output / FAILURES_FILE}" if self.total.failed else ""
            raise MedusaTrainError(
                f"not one of {self._plan['num_prompts']} prompts gave a usable answer: "
                f"{reasons}{see}"
            )
        if writer is not None:
            writer.finish()

    def _units(self) -> Iterator[Unit]:
        for number in range(self._plan["num_units"]):
            for journal in self._journals:
                if number in journal:
                    yield journal.read(number)
                    break

    def _fault(self, row: Conversation, faults: dict[str, str | None]) -> str | None:
        """Why a row is left out; ``faults`` has the prompts of its unit, which all differ.

        So a prompt that its own unit has had already is the same conversation's next row.
        """
        key = prompt_key(
            row.messages,
            prompt_ids=row.input_ids[: row.assistant_spans[0][0]],
            system_prompt=self._system_prompt,
        )
        if key is not None:
            if key not in faults:
                faults[key] = self._prompts.fault(key)
            if (fault := faults[key]) is not None:
                return fault
        content = hashlib.blake2b(array("I", row.input_ids).tobytes(), digest_size=16).digest()
        if content in self._contents:
            return filters.DUPLICATE_ROW
        self._contents.add(content)
        return None

    def _count(self, unit: Unit) -> None:
        total = self.total
        total.dropped += unit.dropped
        total.shortened += unit.shortened
        total.failed += unit.failed
        total.num_drawn += unit.num_drawn
        total.num_usable += unit.num_usable
        total.num_tokens += unit.num_tokens
        total.seconds += unit.seconds
        self.num_units += 1

    def _count_row(self, row: Conversation) -> None:
        self.num_answers += len(row.finish_reasons)
        self.num_ended += row.finish_reasons.count("stop")
        self.num_retokenised += row.retokenised

    def _manifest(self) -> dict[str, Any]:
        """What the manifest says; complete when all rows have been written."""
        total, plan = self.total, dict(self._plan)
        num_units = plan.pop("num_units")
        usable = total.num_usable - self.num_duplicates[MAGPIE]
        drawn = {"drawn": total.num_drawn, "usable": usable} if total.num_drawn else None
        return {
            **plan,
            "num_missing_units": num_units - self.num_units,
            "num_dropped": dict(sorted(total.dropped.items())),
            "num_shortened": dict(sorted(total.shortened.items())),
            "num_failed": dict(sorted(_reasons(total.failed).items())),
            "num_retokenised": self.num_retokenised,
            "prompts_of_the_model": drawn,
            "end_of_turn": {"with": self.num_ended, "without": self.num_answers - self.num_ended},
            "num_tokens": total.num_tokens,
            "seconds": round(total.seconds, 1),
        }

    def _write_failures(self, output: Path) -> None:
        path = output / FAILURES_FILE
        if self.total.failed:
            write_json_lines(path, [asdict(failure) for failure in self.total.failed])
        else:
            path.unlink(missing_ok=True)


def say(manifest: Mapping[str, Any], *, output: Path) -> None:
    """Say on stderr what a data set has become, and what is not in it."""
    num_rows, num_prompts = manifest["num_conversations"], manifest["num_prompts"]
    dropped = listed(Counter(manifest["num_dropped"]))
    log(
        f"distill: {num_rows} conversations of {num_prompts} prompts, "
        f"{manifest['num_tokens']:,} tokens" + (f"; dropped: {dropped}" if dropped else "")
    )
    written = manifest["prompts_of_the_model"]
    if written is not None:
        share = written["usable"] / written["drawn"]
        log(
            f"distill: {written['usable']} of {written['drawn']} prompts that the model wrote are "
            f"usable and distinct ({share:.0%})"
        )
    if manifest["num_shortened"]:
        shortened = listed(Counter(manifest["num_shortened"]))
        log(f"distill: conversations that end before their last turn: {shortened}")
    if manifest["num_retokenised"]:
        log(f"distill: {manifest['num_retokenised']} conversations were tokenised from text")
    if manifest["num_failed"]:
        failed = listed(Counter(manifest["num_failed"]))
        log(f"distill: without an answer: {failed}; see {output / FAILURES_FILE}")


def listed(reasons: Counter[str]) -> str:
    """``reason: count`` of each, in one line."""
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(reasons.items()))


def _reasons(failed: Sequence[Failed]) -> Counter[str]:
    return Counter(failure.reason for failure in failed)
