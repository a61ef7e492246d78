"""Generation in process: many prompts through one model, each row in its own slot.

The library's ``generate`` pads on the left, keeps finished rows, copies its cache at each step and
sorts or normalises the whole vocabulary. Here prompts go straight into slots, a finished row
leaves at once, its slot goes to the next prompt, and when there is none the batch shrinks.
What a call returns depends on its arguments alone (float results depend on the batch's shape, so
one call is the unit that can be repeated).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from medusa_train.base_model.packed_linear import packed_linears
from medusa_train.distill.attention import attention_plan
from medusa_train.distill.sampling import Sampler, Sampling
from medusa_train.distill.slot_attention import group_rows, grouped, slot_attention
from medusa_train.distill.slot_cache import SlotCache
from medusa_train.distill.teacher import TeacherRecorder
from medusa_train.distill.writer import Answer, Stopping, Teacher

# Tokens of one pass over prompts: enough to use the machine, few enough for its memory.
PROMPT_PASS_TOKENS = 4096
# A shared beginning shorter than this is not worth a pass of its own.
MIN_PREFIX = 4
# Freed slots are filled together once they are this share of all: a pass reads all weights.
REFILL_SHARE = 8


@dataclass(slots=True)
class _Rows:
    """The active rows, in the order of their slots."""

    requests: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def remove(self, row: int) -> int:
        """Let the last row take the place of ``row``; returns the last row's old slot."""
        last = len(self.requests) - 1
        for values in (self.requests, self.tokens, self.positions):
            values[row] = values[last]
            values.pop()
        return last


class InProcessEngine:
    """Writes answers with one model.

    Args:
        model: in eval mode; any that keeps keys and values per position.
        vocab_size: the number of the tokenizer's ids; greater ids are never drawn.
        max_rows: the most rows decoded together.

    Raises:
        InputError: the model's cache cannot be used so; names the model.
    """

    def __init__(self, model: PreTrainedModel, *, vocab_size: int, max_rows: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self.max_rows = max_rows
        self.plan = attention_plan(model)
        self._cache: SlotCache | None = None

    @property
    def max_length(self) -> int | None:
        """The most positions a row can have, prompt and answer together."""
        return self.plan.max_length

    def cache(self, num_slots: int, *, bound: int) -> SlotCache:
        """A cache with ``num_slots`` rows or more of up to ``bound`` positions, kept for reuse.

        What earlier rows left in it is masked like what was never written.
        """
        if self._cache is None or self._cache.num_slots < num_slots:
            self._cache = SlotCache(
                self.plan.num_layers, num_slots=num_slots, device=self.model.device
            )
        self._cache.bound = bound
        return self._cache

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        stopping: Stopping,
        generator: torch.Generator,
        teacher: Teacher | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> list[Answer]:
        """Answer every prompt; the answers are in the order of the prompts.

        Args:
            prompts: token ids, at least one each, and shorter than :attr:`max_length`.
            sampling: how tokens are drawn.
            stopping: when a row ends.
            generator: gives one uniform number per token; on the model's device.
            teacher: which log-probabilities the answers have; changes none of their tokens.
            on_step: called after each step with the number of tokens it wrote.

        Raises:
            ValueError: a prompt is empty or too long, or ``teacher.num`` is not within
                1 … ``vocab_size``.
        """
        if not all(prompts):
            raise ValueError("a prompt must have at least one token")
        if self.max_length is not None and max(map(len, prompts), default=0) >= self.max_length:
            raise ValueError(f"a prompt must be shorter than {self.max_length} tokens")
        if teacher is not None and teacher.num > self.vocab_size:
            raise ValueError(f"a teacher of {teacher.num} of {self.vocab_size} tokens is too large")
        run = _Run(
            self,
            prompts,
            stopping=stopping,
            sampler=Sampler(sampling, generator=generator),
            recorder=None if teacher is None else TeacherRecorder(teacher, generator=generator),
        )
        with (
            torch.inference_mode(),
            slot_attention(self.model),
            packed_linears(self.model, num_rows=run.num_slots),
        ):
            for num_tokens in run.steps():
                if on_step is not None:
                    on_step(num_tokens)
        return run.answers()


class _Run:
    """The state of one call of :meth:`InProcessEngine.generate`."""

    def __init__(
        self,
        engine: InProcessEngine,
        prompts: Sequence[Sequence[int]],
        *,
        stopping: Stopping,
        sampler: Sampler,
        recorder: TeacherRecorder | None,
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self.stopping = stopping
        self.sampler = sampler
        self.recorder = recorder
        self.device = engine.model.device
        self.num_slots = min(engine.max_rows, len(prompts))
        bound = max(map(len, prompts), default=0) + stopping.max_new_tokens
        self.cache = engine.cache(self.num_slots, bound=bound)
        self.written: list[list[int]] = [[] for _ in prompts]
        self.reasons: list[Literal["stop", "length"]] = ["length" for _ in prompts]
        self.rows = _Rows()

    def answers(self) -> list[Answer]:
        """What was written, in the order of the prompts."""
        num_prompts = len(self.prompts)
        teachers = self.recorder.results(num_prompts) if self.recorder else [None] * num_prompts
        parts = zip(self.written, self.reasons, teachers, strict=True)
        return [Answer(tuple(tokens), reason, teacher=teacher) for tokens, reason, teacher in parts]

    def steps(self) -> Iterator[int]:
        """Run to the end, yielding the number of tokens of each step."""
        waiting = list(range(len(self.prompts)))[::-1]
        prefix = self._write_prefix()
        enough = max(1, self.num_slots // REFILL_SHARE)
        while waiting or self.rows.requests:
            num_free = self.num_slots - len(self.rows.requests)
            if waiting and num_free >= min(enough, len(waiting)):
                taken = [waiting.pop() for _ in range(min(num_free, len(waiting)))]
                self._admit(taken, prefix=prefix)
            tokens = self._step()
            yield len(tokens)
            self._finish(tokens)

    def _write_prefix(self) -> int:
        """Put what all prompts begin with into all slots, once; returns its length."""
        # The last token of a prompt is the first step's input, so it is never part of the prefix.
        longest = min((len(prompt) for prompt in self.prompts), default=0) - 1
        first = self.prompts[0] if self.prompts else ()
        length = 0
        while length < longest and all(p[length] == first[length] for p in self.prompts):
            length += 1
        if length < MIN_PREFIX or self.num_slots == 1:
            return 0
        self._prompt_pass([first[:length]], slots=[0], start=0)
        self.cache.copy_slot(0, slice(1, self.num_slots), length=length)
        return length

    def _admit(self, requests: Sequence[int], *, prefix: int) -> None:
        """Give slots to ``requests`` and write their prompts, but for each one's last token."""
        first_slot = len(self.rows.requests)
        requests = sorted(requests, key=lambda request: -len(self.prompts[request]))
        for request in requests:
            prompt = self.prompts[request]
            self.rows.requests.append(request)
            self.rows.tokens.append(prompt[-1])
            self.rows.positions.append(len(prompt) - 1)
        slots = [
            first_slot + i for i, r in enumerate(requests) if len(self.prompts[r]) - 1 > prefix
        ]
        # The longest come first: prompts of like length go together, so that little is padded.
        while slots:
            width = self.rows.positions[slots[0]] - prefix
            count = max(1, PROMPT_PASS_TOKENS // width)
            group, slots = slots[:count], slots[count:]
            parts = [self.prompts[self.rows.requests[slot]][prefix:-1] for slot in group]
            self._prompt_pass(parts, slots=group, start=prefix)

    def _prompt_pass(
        self, prompts: Sequence[Sequence[int]], *, slots: Sequence[int], start: int
    ) -> None:
        """Write keys and values of ``prompts``, the longest first, to ``slots``."""
        length = len(prompts[0])
        ids = torch.tensor([[*p, *[p[-1]] * (length - len(p))] for p in prompts])
        self.cache.write_prompts(
            torch.tensor(slots, device=self.device), start=start, length=length
        )
        mask = self.engine.plan.prompt_mask(
            start=start, length=length, dtype=self.engine.model.dtype, device=self.device
        )
        positions = torch.arange(start, start + length, device=self.device)
        self._forward(ids.to(self.device), positions.expand(len(prompts), -1), mask)

    def _step(self) -> list[int]:
        """One token for each active row."""
        positions = torch.tensor(self.rows.positions, device=self.device)
        length = max(self.rows.positions) + 1
        self.cache.write_step(positions, length=length)
        mask = self.engine.plan.step_mask(positions, length=length, dtype=self.engine.model.dtype)
        ids = torch.tensor(self.rows.tokens, device=self.device)[:, None]
        # On a GPU one call over all rows is faster than one for each group.
        groups = group_rows(self.rows.positions) if self.device.type == "cpu" else None
        with grouped(groups):
            logits = self._forward(ids, positions[:, None], mask)
        logits = logits[:, -1, : self.engine.vocab_size]
        tokens: list[int] = self.sampler.draw(logits).tolist()
        if self.recorder is not None:
            self.recorder.record(logits, self.rows.requests)
        return tokens

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: Any) -> torch.Tensor:
        output = self.engine.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits
        return logits

    def _finish(self, tokens: Sequence[int]) -> None:
        """Keep the new tokens; rows that are finished leave, and the last ones take their slots."""
        stopping = self.stopping
        finished = []
        limit = self.engine.max_length
        for row, token in enumerate(tokens):
            written = self.written[self.rows.requests[row]]
            written.append(token)
            self.rows.tokens[row] = token
            self.rows.positions[row] += 1
            is_end = stopping.is_end is not None and stopping.is_end(written)
            if token in stopping.stop_ids or is_end:
                self.reasons[self.rows.requests[row]] = "stop"
                finished.append(row)
            elif len(written) >= stopping.max_new_tokens or self.rows.positions[row] + 1 == limit:
                finished.append(row)
        for row in reversed(finished):
            length = self.rows.positions[-1]
            last = self.rows.remove(row)
            if last != row:
                self.cache.copy_slot(last, slice(row, row + 1), length=length)
