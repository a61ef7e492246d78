"""What became of the rows of a file: kept, repaired or dropped, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from medusa_train.errors import InputErrors

MAX_LOCATIONS = 5
MAX_STRICT_ERRORS = 20


@dataclass(frozen=True, slots=True)
class Reason:
    """How many rows had one fate, and where the first of them are.

    Attributes:
        count: the number of rows.
        locations: ``file:line`` of the first ones, with a detail where there is one.
    """

    count: int
    locations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The fate of every row of a file; each row has exactly one.

    Attributes:
        num_kept: rows taken as they are.
        repaired: rows taken after a repair, by repair.
        dropped: rows left out, by reason.
        notes: what else was met, by kind; these count occurrences, and may meet a row twice.
    """

    num_kept: int
    repaired: Mapping[str, Reason]
    dropped: Mapping[str, Reason]
    notes: Mapping[str, int]

    @property
    def num_repaired(self) -> int:
        return sum(reason.count for reason in self.repaired.values())

    @property
    def num_dropped(self) -> int:
        return sum(reason.count for reason in self.dropped.values())

    @property
    def num_rows(self) -> int:
        return self.num_kept + self.num_repaired + self.num_dropped

    def rows(self) -> list[tuple[str, str, int]]:
        """The report as table rows (fate, reason, rows); the last one is the sum of the others."""
        table = [("kept", "", self.num_kept)]
        for fate, reasons in (("repaired", self.repaired), ("dropped", self.dropped)):
            table += [(fate, text, reason.count) for text, reason in reasons.items()]
        return [*table, ("all rows", "", self.num_rows)]

    def location_lines(self) -> list[str]:
        """One line per reason that says where its first rows are."""
        lines = []
        for fate, reasons in (("repaired", self.repaired), ("dropped", self.dropped)):
            for text, reason in reasons.items():
                more = reason.count - len(reason.locations)
                tail = f" and {more} more" if more else ""
                lines.append(f"{fate}: {text}: {', '.join(reason.locations)}{tail}")
        return lines

    def summary(self) -> str:
        """The reasons for dropped rows in one line, for an error message."""
        if not self.num_rows:
            return "there are no rows"
        if not self.dropped:
            return ""
        reasons = ", ".join(f"{text}: {reason.count}" for text, reason in self.dropped.items())
        return f"{self.num_dropped} of {self.num_rows} rows were dropped ({reasons})"

    def as_json(self) -> dict[str, object]:
        """The report as one JSON object."""
        return {
            "num_rows": self.num_rows,
            "num_kept": self.num_kept,
            "num_repaired": self.num_repaired,
            "num_dropped": self.num_dropped,
            "repaired": _as_json(self.repaired),
            "dropped": _as_json(self.dropped),
            "notes": dict(self.notes),
        }


@dataclass(slots=True)
class Tally:
    """Collects the fates of rows while a file is read."""

    num_kept: int = 0
    _counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {"repaired": Counter(), "dropped": Counter()}
    )
    _locations: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    _notes: Counter[str] = field(default_factory=Counter)
    _strict_errors: list[str] = field(default_factory=list)

    def keep(self) -> None:
        """A row was taken as it is."""
        self.num_kept += 1

    def repair(self, reason: str, location: str) -> None:
        """A row was taken after a repair."""
        self._count("repaired", reason, location, "")

    def drop(self, reason: str, location: str, *, detail: str = "") -> None:
        """A row was left out; ``detail`` is what was found there."""
        self._count("dropped", reason, location, detail)

    def note(self, kind: str, count: int = 1) -> None:
        """Something was met that is neither a repair nor a loss."""
        if count:
            self._notes[kind] += count

    def report(self) -> Report:
        """The fates so far."""
        repaired, dropped = (
            {
                text: Reason(count, tuple(self._locations[fate, text]))
                for text, count in sorted(self._counts[fate].items())
            }
            for fate in ("repaired", "dropped")
        )
        return Report(self.num_kept, repaired, dropped, dict(sorted(self._notes.items())))

    def refuse_changes(self) -> None:
        """Strict reading: every repaired or dropped row is an error.

        Raises:
            InputErrors: names the first of them.
        """
        if not self._strict_errors:
            return
        total = sum(counts.total() for counts in self._counts.values())
        lines = list(self._strict_errors)
        if total > len(lines):
            where = lines[-1].partition(":")[0]
            lines.append(f"{where}: {total - len(lines)} more rows like these")
        raise InputErrors(lines)

    def _count(self, fate: str, reason: str, location: str, detail: str) -> None:
        self._counts[fate][reason] += 1
        locations = self._locations.setdefault((fate, reason), [])
        if len(locations) < MAX_LOCATIONS:
            locations.append(f"{location} ({detail})" if detail else location)
        if len(self._strict_errors) < MAX_STRICT_ERRORS:
            is_repair = fate == "repaired"
            problem = "the row needs a repair" if is_repair else "the row cannot be used"
            text = f"{reason}, got {detail}" if detail else reason
            self._strict_errors.append(f"{location}: {problem}: {text} (strict)")


def _as_json(reasons: Mapping[str, Reason]) -> dict[str, object]:
    return {
        text: {"count": reason.count, "locations": list(reason.locations)}
        for text, reason in reasons.items()
    }
