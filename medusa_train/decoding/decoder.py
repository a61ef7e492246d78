"""The decoding loop: propose a tree, verify it in one forward pass, keep what the base agrees with.

Shapes: B rows of the call, b rows that are not done, N tree nodes with the root, D hidden, V rows
of ``lm_head``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_train.decoding.acceptance import Typical, matching_child, typical_node
from medusa_train.decoding.cache import ROOM, CachePlan, keep_accepted, new_cache
from medusa_train.decoding.candidates import CandidateHeads
from medusa_train.decoding.masks import TreeMasks
from medusa_train.decoding.passes import Passes
from medusa_train.decoding.processed import Processors
from medusa_train.decoding.statistics import Statistics
from medusa_train.decoding.texts import Texts
from medusa_train.tree.topology import Tree

PREFILL_TOKENS = 512
"""Tokens of one pass over prompts."""


@dataclass(slots=True)
class _Step:
    """One tree step of the b rows that are not done.

    Attributes:
        tokens: [b][N] of each node.
        logits: [b, N, V] of the base after each node.
        states: [b, N, D] the input of ``lm_head`` at each node.
        nodes: [b] the node that the walk has come to, the last one that is kept.
        paths: [b] the nodes that are kept, from the root on.
        next_tokens: [b] the next step's root, None for a row that is done.
    """

    tokens: list[list[int]]
    logits: Tensor
    states: Tensor
    nodes: list[int]
    paths: list[list[int]]
    next_tokens: list[int | None]


class Decoding:
    """One call.

    Args:
        passes: run the base model.
        plan: how its layers attend.
        heads: they propose; None only with a tree that is its root alone.
        tree: the candidates of each step.
        texts: the prompts.
        starts: [B] columns of left padding.
        processors: the base's logits go through them.
        do_sample: draw from the processed distribution, else take its greatest logit.
        typical: accept what is plausible instead of what was drawn.
        offloading: keep the cache on the CPU.
    """

    def __init__(
        self,
        passes: Passes,
        plan: CachePlan,
        *,
        heads: CandidateHeads | None,
        tree: Tree,
        texts: Texts,
        starts: Tensor,
        processors: Processors,
        do_sample: bool,
        typical: Typical | None,
        offloading: bool = False,
    ) -> None:
        self.passes = passes
        self.window = plan.window
        model = passes.model
        self.heads = heads
        self.tree = tree
        self.texts = texts
        self.processors = processors
        self.do_sample = do_sample
        self.typical = typical
        device = model.device
        self.masks = TreeMasks(tree.mask.to(device), tree.depths.to(device), plan, model.dtype)
        self.parents: list[int] = tree.parents.tolist()
        self.children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            self.children[parent].append(node)
        num_rows = len(texts.lengths)
        self.cache = new_cache(
            model, num_rows=num_rows, length=_first_length(texts, tree), offloading=offloading
        )
        self.rows = list(range(num_rows))
        self.starts = starts.to(device)
        # Columns of the cache.
        self.cached = texts.lengths[0]
        self.statistics = Statistics([[] for _ in self.rows])

    def run(self, input_ids: Tensor, **inputs: Any) -> Statistics:
        """Decode to the end.

        Args:
            input_ids: [B, P] the prompts.
            **inputs: what else the model's forward pass over the prompts takes.
        """
        begin = time.perf_counter()
        with self.passes.ready(num_tokens=len(self.rows) * len(self.parents)):
            logits, states = self._prefill(input_ids, **inputs)
            tokens: list[int] = self._draw(logits, [0] * len(self.rows), step=None).tolist()
            middle = time.perf_counter()
            self.statistics.prefill_seconds = middle - begin
            while self.rows:
                tokens, states = self._step(tokens, states)
            self.statistics.decode_seconds = time.perf_counter() - middle
        return self.statistics

    def _prefill(self, input_ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """[B, V] logits and [B, D] states of the last prompt tokens, which all rows have last."""
        prepare: Any = self.passes.model.prepare_inputs_for_generation
        prepared = prepare(
            input_ids,
            is_first_iteration=True,
            cache=self.cache,
            logits_to_keep=1,
            use_cache=True,
            **inputs,
        )
        prepared.pop("use_cache", None)
        for part in self._parts(prepared):
            logits, states = self.passes(**part)
        self.cache.activate_past_recording()
        # A copy: with a view the whole prompt's states would stay.
        return logits[:, -1], states[:, -1].clone()

    def _parts(self, prepared: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The prompts' pass in parts, so that a long prompt's activations take little memory.

        Sliding layers and padded rows go in one piece.
        """
        num_rows, length = prepared["input_ids"].shape
        size = max(1, PREFILL_TOKENS // num_rows)
        if self.window is not None or bool(self.starts.any()):
            size = length
        mask: Tensor | None = prepared.get("attention_mask")
        for start in range(0, length, size):
            columns = slice(start, start + size)
            part = {name: prepared[name][:, columns] for name in ("input_ids", "position_ids")}
            seen = None if mask is None else mask[:, : columns.stop]
            yield {**prepared, **part, "attention_mask": seen}

    def _step(self, roots: Sequence[int], states: Tensor) -> tuple[list[int], Tensor]:
        """Emit the roots and what is accepted after them; the next roots, and [b, D] states."""
        goes_on = []
        for row, token in zip(self.rows, roots, strict=True):
            self.statistics.accepted[row].append(0)
            goes_on.append(self.texts.append(row, token))
        kept = [i for i, on in enumerate(goes_on) if on]
        self._drop(kept)
        if not self.rows:
            return [], states
        step = self._verify([roots[i] for i in kept], states[kept])
        if self.typical is None:
            self._walk(step)
        else:
            self._accept_typical(step, self.typical)
        kept = [i for i, token in enumerate(step.next_tokens) if token is not None]
        self._keep(step, kept)
        last = step.states[kept, [step.nodes[i] for i in kept]]
        return [token for token in step.next_tokens if token is not None], last

    def _verify(self, roots: Sequence[int], states: Tensor) -> _Step:
        """The base's logits at every node, in one pass."""
        tokens = torch.tensor(roots, device=states.device)[:, None]
        if self.heads is not None:
            tokens = torch.cat([tokens, self.heads.propose(states, self.tree)], dim=1)
        # The root's token is in the text but not yet in the cache.
        lengths = torch.tensor([self.texts.lengths[row] - 1 for row in self.rows])
        lengths = lengths.to(self.starts.device)
        positions = self.masks.position_ids(self.starts, lengths)
        if self.texts.max_length is not None:
            # Nodes beyond the last token are never reached; tables of positions end there.
            positions = torch.minimum(positions, (self.texts.max_length - 1 - self.starts)[:, None])
        logits, states = self.passes.over_tree(
            self.cache,
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self.masks.masks(self.cache, starts=self.starts, lengths=lengths),
        )
        self.statistics.num_passes += 1
        num = len(self.rows)
        return _Step(
            tokens.tolist(), logits, states, [0] * num, [[0] for _ in range(num)], [None] * num
        )

    def _walk(self, step: _Step) -> None:
        """From each row's root, follow the children that carry what the base says."""
        walking = list(range(len(self.rows)))
        while walking:
            nodes = [step.nodes[i] for i in walking]
            drawn = self._draw(step.logits[walking, nodes], walking, step=step).tolist()
            still = []
            for i, token in zip(walking, drawn, strict=True):
                child = matching_child(
                    token, children=self.children[step.nodes[i]], tokens=step.tokens[i]
                )
                if child is None:
                    step.next_tokens[i] = token
                elif self._accept(step, i, child):
                    still.append(i)
            walking = still

    def _accept(self, step: _Step, i: int, child: int) -> bool:
        """Keep and emit a node; returns whether its row goes on."""
        row = self.rows[i]
        step.nodes[i] = child
        step.paths[i].append(child)
        self.statistics.accepted[row][-1] += 1
        return self.texts.append(row, step.tokens[i][child])

    def _accept_typical(self, step: _Step, typical: Typical) -> None:
        """Keep each row's longest path of plausible candidates, and draw the token after it."""
        for i in range(len(self.rows)):
            probabilities = self._processed(step, i).softmax(dim=-1)
            best = typical_node(
                probabilities,
                tokens=torch.tensor(step.tokens[i], device=probabilities.device),
                parents=self.parents,
                typical=typical,
            )
            path = [best] if best else []
            while path and (parent := self.parents[path[0]]):
                path.insert(0, parent)
            if all(self._accept(step, i, node) for node in path):
                kept = typical.kept(probabilities[best])
                step.next_tokens[i] = int(torch.multinomial(kept, 1))

    def _processed(self, step: _Step, i: int) -> Tensor:
        """[N, V] processed logits of all nodes of a row, each with its own path as its text."""
        text = self.texts.row(self.rows[i])
        paths: list[list[int]] = [[]]
        for node in range(1, len(self.parents)):
            paths.append([*paths[self.parents[node]], step.tokens[i][node]])

        def node_text(node: int) -> Tensor:
            path = torch.tensor([paths[node]], dtype=text.dtype, device=text.device)
            return torch.cat([text, path], dim=1)

        return self.processors(step.logits[i], rows=[self.rows[i]] * len(paths), text=node_text)

    def _draw(self, logits: Tensor, walking: Sequence[int], *, step: _Step | None) -> Tensor:
        """[n] the base's next token, from logits [n, V] at the nodes the rows' texts end with."""
        rows = self.rows if step is None else [self.rows[i] for i in walking]
        scores = self.processors(logits, rows=rows, text=lambda i: self.texts.row(rows[i]))
        if self.do_sample:
            return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
        return scores.argmax(dim=-1)

    def _drop(self, kept: Sequence[int]) -> None:
        """Rows that are done leave the batch."""
        if len(kept) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in kept]
        if self.rows:
            index = torch.tensor(kept, device=self.starts.device)
            self.starts = self.starts[index]
            self.cache.batch_select_indices(index)

    def _keep(self, step: _Step, kept: Sequence[int]) -> None:
        """Drop the rows that are done, and keep the accepted nodes of the others in the cache."""
        # The tree's nodes lie behind these columns.
        before = self.cached
        self._drop(kept)
        if not self.rows:
            return
        paths = [step.paths[i] for i in kept]
        # All tokens of a text are cached now, up to the node that its walk came to.
        ends = [self.texts.lengths[row] for row in self.rows]
        total, after = before + len(self.parents), max(ends)
        width = max(map(len, paths))
        sources, targets = [], []
        for path, end in zip(paths, ends, strict=True):
            pairs = [(before + node, end - len(path) + i) for i, node in enumerate(path)]
            pairs += [pairs[-1]] * (width - len(pairs))
            sources.append([source - total for source, _ in pairs])
            targets.append([target - total for _, target in pairs])
        keep_accepted(
            self.cache,
            sources=torch.tensor(sources),
            targets=torch.tensor(targets),
            num_dropped=total - after,
        )
        self.cached = after


def _first_length(texts: Texts, tree: Tree) -> int:
    """Columns that a cache has from the start: the prompts, a short answer, and the tree.

    A cache that grows holds two storages for a moment, and the freed one's memory is too small
    for the next layer's.
    """
    length = texts.lengths[0] + ROOM
    if texts.max_length is not None:
        length = min(length, texts.max_length)
    return length + len(tree.parents)
