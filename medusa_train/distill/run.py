"""One generation: blocks of prompts and answers, resumable, to a data set directory.

Float results depend on the batch's shape, so the unit of work is a block of prompts, whose schedule
and random numbers depend on the block alone. A finished block is a file; an unfinished one is done
again. So an interrupted run and a straight one give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_train.base_model.load import BaseModel
from medusa_train.console import ProgressReporter, log, progress
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import (
    MANIFEST_FILE,
    Conversation,
    from_line,
    read_manifest,
    to_line,
    write_dataset,
)
from medusa_train.distill import filters
from medusa_train.distill.in_process import InProcessEngine
from medusa_train.distill.prompts import (
    MAGPIE,
    Prompt,
    encode_prompts,
    file_prompts,
    write_prompts,
)
from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.writer import Answer, Stopping
from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.run_dir import (
    atomic_path,
    file_fingerprint,
    fingerprint,
    locked,
    read_json,
    write_json,
)

BLOCKS = "blocks"
PLAN_FILE = "plan.json"
# Below this share of usable prompts the model or its template is not fit for Magpie.
MIN_MAGPIE_YIELD = 0.05


@dataclass(frozen=True, slots=True)
class _Block:
    """A finished block: its rows, what was dropped, and what it took."""

    rows: list[Conversation]
    dropped: Counter[str]
    num_tokens: int
    seconds: float


def run_distill(
    base: BaseModel, chat: ChatTokenizer, *, settings: DistillSettings, output: Path
) -> dict[str, Any]:
    """Generate a data set, or go on with one.

    Args:
        base: the model that writes.
        chat: its tokenizer and template.
        settings: what to generate.
        output: directory of the data set; holds ``blocks/`` until it is complete.

    Returns:
        The data set's manifest.

    Raises:
        InputError: no chat template; another generation lies in ``output``; a bad prompt file.
        MedusaTrainError: the model writes next to no usable prompts; the disk is full.
    """
    if not chat.has_template:
        raise InputError(
            f"{base.name_or_path}: the tokenizer has no chat template, so there is no prompt to "
            "answer; give one (data.chat_template in a recipe)"
        )
    generation = _Generation(base, chat, settings=settings, output=output)
    with locked(output):
        if (output / MANIFEST_FILE).exists():
            generation.check_same(read_manifest(output).get("generation"))
            return read_manifest(output)
        try:
            generation.run()
        except KeyboardInterrupt:
            done = len(list((output / BLOCKS).glob("*.jsonl")))
            log(
                f"interrupted: {done} of {generation.num_blocks} blocks are finished and kept; "
                "run the same command again to go on"
            )
            raise
        manifest = generation.finish()
        shutil.rmtree(output / BLOCKS)
    return manifest


class _Generation:
    """What the blocks of one generation share."""

    def __init__(
        self, base: BaseModel, chat: ChatTokenizer, *, settings: DistillSettings, output: Path
    ) -> None:
        self.base = base
        self.chat = chat
        self.settings = settings
        self.output = output
        self.engine = InProcessEngine(
            base.model, vocab_size=chat.vocab_size, max_rows=settings.batch_size
        )
        self.file = None if settings.prompts is None else file_prompts(settings)
        num_prompts = settings.num_prompts if self.file is None else len(self.file)
        if num_prompts is None:
            raise InputError("num_prompts: must be given when there is no file of prompts")
        self.num_prompts = num_prompts
        self.num_blocks = -(-num_prompts // settings.block_size)

    @property
    def source(self) -> str:
        """Where the prompts come from, as rows name it."""
        return MAGPIE if self.settings.prompts is None else Path(self.settings.prompts).name

    def identity(self) -> dict[str, Any]:
        """All that decides the rows; another one must not go on in the same directory."""
        settings = asdict(self.settings)
        prompts = settings.pop("prompts")
        return {
            "base_fingerprint": self.base.fingerprint,
            "dtype": str(self.base.model.dtype).removeprefix("torch."),
            "chat_template_hash": self.chat.chat_template_hash,
            "chat_template_kwargs": self.chat.chat_template_kwargs,
            "settings": settings,
            "prompts": None if prompts is None else file_fingerprint(Path(prompts)),
        }

    def check_same(self, other: Any) -> None:
        """Raise unless ``other`` is the identity of this very generation."""
        mine = self.identity()
        if other == mine:
            return
        known = other if isinstance(other, dict) else {}
        flat = [{**known, **known.get("settings", {})}, {**mine, **mine["settings"]}]
        names = sorted(
            key for key in flat[1] if key != "settings" and flat[0].get(key) != flat[1][key]
        )
        changed = ", ".join(f"{n} {flat[0].get(n)!r} → {flat[1][n]!r}" for n in names)
        raise InputError(
            f"{self.output}: holds another generation ({changed}); give another directory, or "
            "remove this one"
        )

    def run(self) -> None:
        """Generate the blocks that are not there yet."""
        directory = self.output / BLOCKS
        if (directory / PLAN_FILE).exists():
            self.check_same(read_json(directory / PLAN_FILE))
        write_json(directory / PLAN_FILE, self.identity())
        missing = [b for b in range(self.num_blocks) if not self._path(b).exists()]
        done = self.num_prompts - sum(self._size(block) for block in missing)
        if done:
            log(f"distill: going on, {done} of {self.num_prompts} prompts are done")
        with progress("distill", self.num_prompts, done=done) as bar:
            for block in missing:
                result = self._generate(block, bar)
                self._write(block, result)
                rate = result.num_tokens / max(result.seconds, 1e-9)
                bar.update(self._size(block), detail=f"prompts, {rate:,.0f} tokens/s")
                self._check_yield(block, result)

    def finish(self) -> dict[str, Any]:
        """Put the blocks together, without prompts that occur twice."""
        dropped: Counter[str] = Counter()
        seen: set[tuple[str, ...]] = set()
        rows: list[Conversation] = []
        seconds, num_tokens = 0.0, 0
        for number in range(self.num_blocks):
            block = self._read(number)
            dropped += block.dropped
            seconds += block.seconds
            num_tokens += block.num_tokens
            for row in block.rows:
                key = filters.prompt_key(row.messages[:-1])
                if key in seen:
                    dropped[filters.DUPLICATE_PROMPT] += 1
                    continue
                seen.add(key)
                rows.append(row)
        if not rows:
            raise MedusaTrainError(
                f"{self.output}: not one of {self.num_prompts} prompts gave a usable answer: "
                f"{_listed(dropped)}"
            )
        write_dataset(self.output, rows, manifest=self._manifest(rows, dropped, seconds))
        log(
            f"distill: {len(rows)} conversations of {self.num_prompts} prompts "
            f"({len(rows) / self.num_prompts:.0%}), {num_tokens:,} tokens in {seconds:,.0f} s"
            + (f"; dropped: {_listed(dropped)}" if dropped else "")
        )
        return read_manifest(self.output)

    def _manifest(
        self, rows: list[Conversation], dropped: Counter[str], seconds: float
    ) -> dict[str, Any]:
        ended = sum(row.finish_reasons[-1] == "stop" for row in rows)
        return {
            "base_model": self.base.name_or_path,
            "base_fingerprint": self.base.fingerprint,
            "tokenizer_hash": self.chat.tokenizer_hash,
            "chat_template_hash": self.chat.chat_template_hash,
            "chat_template_kwargs": self.chat.chat_template_kwargs,
            "source": self.source,
            "sampling": self.settings.row_sampling(),
            "seed": self.settings.seed,
            "generation": self.identity(),
            "num_prompts": self.num_prompts,
            "num_dropped": dict(sorted(dropped.items())),
            "end_of_turn": {"with": ended, "without": len(rows) - ended},
            "seconds": round(seconds, 1),
        }

    def _generate(self, block: int, bar: ProgressReporter) -> _Block:
        begin = time.monotonic()
        num_tokens = 0

        def on_step(tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            rate = num_tokens / max(time.monotonic() - begin, 1e-9)
            bar.update(0, detail=f"prompts, {rate:,.0f} tokens/s")

        generator = torch.Generator(self.base.device).manual_seed(self._seed(block))
        first, count = block * self.settings.block_size, self._size(block)
        if self.file is None:
            drawn = write_prompts(
                self.engine,
                self.chat,
                settings=self.settings,
                first_index=first,
                count=count,
                generator=generator,
                on_step=on_step,
            )
        else:
            drawn = encode_prompts(
                self.file[first : first + count],
                chat=self.chat,
                settings=self.settings,
                first_index=first,
                max_length=self.engine.max_length,
            )
        answers = self.engine.generate(
            [prompt.input_ids for prompt in drawn.prompts],
            sampling=self.settings.answer_sampling,
            stopping=Stopping(
                self.chat.stop_ids,
                self.settings.max_new_tokens,
                filters.loop_watch(self.settings),
            ),
            generator=generator,
            on_step=on_step,
        )
        rows, dropped = [], drawn.dropped
        for prompt, answer in zip(drawn.prompts, answers, strict=True):
            fault = filters.answer_fault(
                answer, settings=self.settings, stop_ids=self.chat.stop_ids
            )
            if fault is None:
                rows.append(self._row(prompt, answer))
            else:
                dropped[fault] += 1
        return _Block(rows, dropped, num_tokens, time.monotonic() - begin)

    def _row(self, prompt: Prompt, answer: Answer) -> Conversation:
        start = len(prompt.input_ids)
        sampling = self.settings.row_sampling()
        asked = prompt.index if self.file is None else list(prompt.input_ids)
        text = self.chat.tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
        return Conversation(
            id=fingerprint([self.base.fingerprint, self.source, asked, sampling]),
            source=self.source,
            messages=(*prompt.messages, {"role": "assistant", "content": text}),
            input_ids=prompt.input_ids + answer.token_ids,
            assistant_spans=((start, start + len(answer.token_ids)),),
            finish_reasons=(answer.finish_reason,),
            sampling=sampling,
        )

    def _seed(self, block: int) -> int:
        digest = hashlib.sha256(f"{self.settings.seed}/{block}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def _size(self, block: int) -> int:
        size = self.settings.block_size
        return min(size, self.num_prompts - block * size)

    def _path(self, block: int) -> Path:
        return self.output / BLOCKS / f"{block:06d}.jsonl"

    def _write(self, block: int, result: _Block) -> None:
        facts = {
            "dropped": dict(result.dropped),
            "num_tokens": result.num_tokens,
            "seconds": round(result.seconds, 3),
        }
        with (
            atomic_path(self._path(block)) as temporary,
            temporary.open("w", encoding="utf-8", errors="surrogatepass", newline="\n") as file,
        ):
            file.write(json.dumps(facts) + "\n")
            file.writelines(map(to_line, result.rows))

    def _read(self, block: int) -> _Block:
        lines = self._lines(block)
        facts = json.loads(next(lines))
        rows = [from_line(line) for line in lines]
        return _Block(rows, Counter(facts["dropped"]), facts["num_tokens"], facts["seconds"])

    def _lines(self, block: int) -> Iterator[bytes]:
        with self._path(block).open("rb") as file:
            yield from file

    def _check_yield(self, block: int, result: _Block) -> None:
        """Stop a Magpie run whose model does not write user turns, before it costs hours."""
        if self.file is None and len(result.rows) < MIN_MAGPIE_YIELD * self._size(block):
            raise MedusaTrainError(
                f"{self.base.name_or_path}: {len(result.rows)} of {self._size(block)} prompts that "
                f"it wrote were usable ({_listed(result.dropped)}); give a file of prompts "
                "(data.distill.prompts), or another chat template"
            )


def _listed(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in sorted(dropped.items()))
