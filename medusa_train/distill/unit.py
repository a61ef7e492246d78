"""One unit of work: prompts to conversations, turn by turn, with the fate of every prompt."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.teacher_logprobs import encode
from medusa_train.data.template import TemplateRefusedError
from medusa_train.distill import filters
from medusa_train.distill.dialogues import Dialogue, Origin, prompt_key
from medusa_train.distill.duplicates import PromptFilter
from medusa_train.distill.journal import Failed, Unit
from medusa_train.distill.openings import Opening
from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.user_turns import UserTurns
from medusa_train.distill.writer import Answer, Failure, Stopping, Writer


@dataclass(frozen=True, slots=True)
class Work:
    """What all units of a generation share.

    Attributes:
        writer: who answers.
        chat: the tokenizer and its template.
        settings: of the generation.
        origin: what rows say of who wrote them.
        answers: which answers are kept.
    """

    writer: Writer
    chat: ChatTokenizer
    settings: DistillSettings
    origin: Origin
    answers: filters.AnswerFilter

    def seed(self, unit: int, call: int) -> int:
        """Of all draws in one call of the writer."""
        digest = hashlib.sha256(f"{self.settings.seed}/{unit}/{call}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def write_unit(
    number: int, openings: Iterable[Opening], *, work: Work, on_tokens: Callable[[int], None]
) -> Unit:
    """Write the conversations of one unit.

    Args:
        number: of the unit; its random numbers follow from it.
        openings: its prompts.
        work: what all units share.
        on_tokens: called now and then with the number of tokens written since.
    """
    return _UnitRun(number, work, on_tokens).run(openings)


class _UnitRun:
    """The state of one unit."""

    def __init__(self, number: int, work: Work, on_tokens: Callable[[int], None]) -> None:
        self.work = work
        self.unit = Unit(number)
        self._report = on_tokens
        self._num_calls = 0
        self._user_turns = UserTurns(work.chat, work.settings)

    def run(self, openings: Iterable[Opening]) -> Unit:
        begin = time.monotonic()
        settings = self.work.settings
        dialogues = [
            Dialogue(opening, chat=self.work.chat, system_prompt=settings.system_prompt)
            for opening in openings
        ]
        # Those that fail or end early leave ``active``; ``failed`` ones give no rows at all.
        active = self._prompted(dialogues)
        kept = list(active)
        for turn in range(settings.turns):
            if turn:
                active = self._encoded(self._next_user_turns(active))
            active = self._answered(active)
        failed = {fault.index for fault in self.unit.failed}
        for dialogue in kept:
            if dialogue.opening.index not in failed:
                self._keep(dialogue)
        self.unit.seconds = time.monotonic() - begin
        return self.unit

    def _prompted(self, dialogues: Sequence[Dialogue]) -> list[Dialogue]:
        """Those with a prompt that can be asked, each different from the others."""
        has_template = self.work.chat.has_template
        to_write = [d for d in dialogues if d.is_written and has_template]
        written = set(map(id, self._with_user_turns(to_write)))
        drawn = set(map(id, to_write))
        encoded = self._encoded(d for d in dialogues if id(d) not in drawn or id(d) in written)
        different = self._different(encoded)
        # A prompt that a server did not write says nothing about the model.
        failed = {fault.index for fault in self.unit.failed}
        self.unit.num_drawn = sum(d.opening.index not in failed for d in to_write)
        self.unit.num_usable = sum(id(dialogue) in drawn for dialogue in different)
        return different

    def _different(self, dialogues: Sequence[Dialogue]) -> list[Dialogue]:
        settings = self.work.settings
        seen = PromptFilter(near_duplicate=settings.near_duplicate)
        kept = []
        for dialogue in dialogues:
            key = prompt_key(
                dialogue.messages,
                prompt_ids=dialogue.prompt_ids,
                system_prompt=settings.system_prompt,
            )
            fault = self._prompt_fault(dialogue) or (None if key is None else seen.fault(key))
            if fault is None:
                kept.append(dialogue)
            else:
                self.unit.dropped[fault] += 1
        return kept

    def _prompt_fault(self, dialogue: Dialogue) -> str | None:
        if len(dialogue.prompt_ids) > self.work.settings.max_prompt_tokens:
            return filters.LONG_PROMPT
        return self.work.answers.prompt_fault(dialogue.messages)

    def _encoded(self, dialogues: Iterable[Dialogue]) -> list[Dialogue]:
        """Those that the template takes and the model has room for."""
        limit = self.work.writer.max_length
        kept = []
        for dialogue in dialogues:
            try:
                dialogue.ask()
            except TemplateRefusedError as error:
                self.work.chat.template.say_refusal(error)
                self._end(dialogue, filters.REFUSED_PROMPT)
                continue
            if not dialogue.prompt_ids:
                self._end(dialogue, filters.EMPTY_PROMPT)
            elif limit is not None and len(dialogue.prompt_ids) >= limit:
                self._end(dialogue, filters.LONG_PROMPT)
            else:
                kept.append(dialogue)
        return kept

    def _next_user_turns(self, dialogues: Sequence[Dialogue]) -> list[Dialogue]:
        """Those whose user goes on, by replay or by the model's own words."""
        replayed = {id(dialogue) for dialogue in dialogues if dialogue.replay()}
        to_write = [
            dialogue
            for dialogue in dialogues
            if id(dialogue) not in replayed
            and dialogue.messages
            and (dialogue.is_written or self.work.settings.write_user_turns)
        ]
        going_on = replayed | set(map(id, self._with_user_turns(to_write)))
        return [dialogue for dialogue in dialogues if id(dialogue) in going_on]

    def _with_user_turns(self, dialogues: Sequence[Dialogue]) -> list[Dialogue]:
        """Those for which the model wrote a turn of the user."""
        if not dialogues:
            return []
        headers = [self._user_turns.header(d.messages, tools=d.opening.tools) for d in dialogues]
        limit = self.work.writer.max_length
        fitting = [limit is None or len(header) < limit for header in headers]
        for dialogue, fits in zip(dialogues, fitting, strict=True):
            if not fits:
                self._end(dialogue, filters.LONG_PROMPT)
        dialogues = [d for d, fits in zip(dialogues, fitting, strict=True) if fits]
        answers = self._write(
            dialogues,
            [header for header, fits in zip(headers, fitting, strict=True) if fits],
            stopping=self._user_turns.stopping(max(map(len, headers))),
            is_prompt=True,
        )
        kept = []
        for dialogue, answer in answers:
            text, fault = self._user_turns.read(answer)
            if fault is None:
                dialogue.messages.append({"role": "user", "content": text})
                kept.append(dialogue)
            else:
                self._end(dialogue, fault)
        return kept

    def _answered(self, dialogues: Sequence[Dialogue]) -> list[Dialogue]:
        """Those that got an answer which is kept."""
        settings, chat = self.work.settings, self.work.chat
        stopping = Stopping(chat.stop_ids, settings.max_new_tokens, filters.loop_watch(settings))
        prompts = [dialogue.prompt_ids for dialogue in dialogues]
        kept = []
        for dialogue, answer in self._write(dialogues, prompts, stopping=stopping):
            fault = self.work.answers.answer_fault(answer)
            if fault is None:
                dialogue.answer(answer)
                kept.append(dialogue)
            else:
                self._end(dialogue, fault)
        return kept

    def _write(
        self,
        dialogues: Sequence[Dialogue],
        prompts: Sequence[Sequence[int]],
        *,
        stopping: Stopping,
        is_prompt: bool = False,
    ) -> list[tuple[Dialogue, Answer]]:
        """The answers that came; a dialogue without one has failed."""
        settings = self.work.settings
        seed = self.work.seed(self.unit.number, self._num_calls)
        self._num_calls += 1
        if not prompts:
            return []
        answers = self.work.writer.write(
            prompts,
            sampling=settings.prompt_sampling if is_prompt else settings.answer_sampling,
            stopping=stopping,
            seed=seed,
            on_tokens=self._count,
            with_teacher=not is_prompt,
        )
        came = []
        for dialogue, answer in zip(dialogues, answers, strict=True):
            if isinstance(answer, Failure):
                opening = dialogue.opening
                self.unit.failed.append(
                    Failed(opening.index, opening.source, answer.reason, answer.detail)
                )
            else:
                came.append((dialogue, answer))
        return came

    def _count(self, num_tokens: int) -> None:
        self.unit.num_tokens += num_tokens
        self._report(num_tokens)

    def _end(self, dialogue: Dialogue, reason: str) -> None:
        """A dialogue goes no further: it is dropped, or kept as far as it came."""
        counts: Counter[str] = self.unit.shortened if dialogue.has_row else self.unit.dropped
        counts[reason] += 1

    def _keep(self, dialogue: Dialogue) -> None:
        for conversation, teachers in dialogue.conversations(self.work.origin):
            self.unit.rows.append(conversation)
            if self.work.writer.teacher is not None:
                # One row for each supervised token, answer after answer.
                self.unit.teachers.append(
                    encode(
                        np.concatenate([teacher.token_ids for teacher in teachers]),
                        np.concatenate([teacher.logprobs for teacher in teachers]),
                    )
                )
