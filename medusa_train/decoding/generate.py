"""``generate`` with heads: the arguments of transformers' own, and the text of transformers' own.

The library prepares prompts, generation config, logits processors and stopping criteria as it does
for any ``generate``; then its loop is replaced by ours.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from medusa_train.decoding.acceptance import Typical
from medusa_train.decoding.arguments import (
    check_arguments,
    check_options,
    check_prompts,
    left_padding,
    refusals,
)
from medusa_train.decoding.cache import cache_plan
from medusa_train.decoding.candidates import CandidateHeads
from medusa_train.decoding.decoder import Decoding
from medusa_train.decoding.passes import CompiledPasses, Passes
from medusa_train.decoding.processed import Processors
from medusa_train.decoding.statistics import Statistics
from medusa_train.decoding.texts import Texts
from medusa_train.errors import ArgumentError
from medusa_train.heads.model import MedusaHeads
from medusa_train.tree.topology import Tree


@dataclass(frozen=True, slots=True)
class Generated:
    """What ``generate`` returns with ``return_dict_in_generate=True``.

    Attributes:
        sequences: [B, T] prompts and what was written, padded.
        statistics: what decoding did.
    """

    sequences: Tensor
    statistics: Statistics


class Generator:
    """Writes text with a base model and heads.

    Args:
        model: the base model.
        heads: of this base, or None for the plain loop (a tree of its root alone).
        num_tokens: the ids of the tokenizer; greater ones are never proposed.
        compiled: compile the pass over a tree: a minute or two at its first step, then faster; the
            model's weights must not change any more.

    Raises:
        InputError: decoding with heads cannot be exact on this model; it is named.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        heads: MedusaHeads | None,
        *,
        num_tokens: int,
        compiled: bool = False,
    ) -> None:
        self.model = model
        self.passes = CompiledPasses(model) if compiled else Passes(model)
        self.plan = cache_plan(model)
        self.heads = None
        if heads is not None:
            self.heads = CandidateHeads(model, heads, num_tokens=num_tokens)

    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        tree: Tree,
        typical: Typical | None = None,
        generation_config: GenerationConfig | None = None,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **kwargs: Any,
    ) -> Tensor | Generated:
        """Write as ``model.generate`` does: greedily, or sampled from the same distribution.

        Args:
            inputs: [B, P] prompts, padded on the left; or ``input_ids=`` and ``attention_mask=``.
            tree: the candidates of each step.
            typical: accept candidates that are plausible instead of those that the base says;
                needs ``do_sample`` and changes the distribution.
            generation_config: as in transformers; ``max_new_tokens=`` and so on may be given too.
            streamer: gets each token of a single row as soon as it is certain.
            tokenizer: needed for stop strings.
            stopping_criteria: further ones; each is asked after each token with one row.
            **kwargs: as in transformers.

        Returns:
            [B, T] prompts and text; or :class:`Generated` with ``return_dict_in_generate=True``.

        Raises:
            ArgumentError: a tree that the heads cannot fill, prompts that are none, or an option
                that means nothing or does not go with heads.
        """
        check_arguments(
            typical=typical,
            generation_config=generation_config,
            streamer=streamer,
            stopping_criteria=stopping_criteria,
        )
        embeddings = self.model.get_input_embeddings()
        check_prompts(inputs, kwargs, num_embeddings=getattr(embeddings, "num_embeddings", None))
        if self.heads is not None:
            self.heads.check_fits(tree)
        elif tree.num_nodes:
            raise ArgumentError("tree: there are no heads to fill it; give a tree without paths")
        criteria = StoppingCriteriaList(stopping_criteria or ())
        generation_config, options = self._take_stop_strings(
            criteria, config=generation_config, tokenizer=tokenizer, options=kwargs
        )

        has_begun = False

        def decode(
            model: PreTrainedModel,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Tensor | Generated:
            nonlocal has_begun
            has_begun = True
            del model
            check_options(generation_config, model_kwargs)
            mask, starts = left_padding(input_ids, model_kwargs)
            if streamer is not None and len(input_ids) > 1:
                raise ArgumentError(f"streamer: needs a batch of one row, got {len(input_ids)}")
            texts = Texts(
                input_ids.to(self.model.device), criteria=stopping_criteria, streamer=streamer
            )
            decoding = Decoding(
                self.passes,
                self.plan,
                heads=self.heads,
                tree=tree,
                texts=texts,
                starts=starts,
                processors=Processors(logits_processor, num_rows=len(input_ids)),
                do_sample=bool(generation_config.do_sample),
                typical=typical,
                offloading=generation_config.cache_implementation == "offloaded",
            )
            statistics = decoding.run(
                input_ids.to(self.model.device),
                attention_mask=mask,
                position_ids=model_kwargs["position_ids"],
            )
            if streamer is not None:
                streamer.end()
            sequences = texts.result(pad=_pad_id(generation_config))
            if generation_config.return_dict_in_generate:
                return Generated(sequences, statistics)
            return sequences

        if typical is not None and not self._is_sampled(generation_config, options):
            raise ArgumentError("typical: is a way to sample; give do_sample=True")
        with refusals(has_begun=lambda: has_begun):
            result: Tensor | Generated = self.model.generate(  # type: ignore[operator]
                inputs,
                generation_config=generation_config,
                stopping_criteria=criteria,
                streamer=streamer,
                custom_generate=decode,
                **options,
            )
        return result

    def _take_stop_strings(
        self,
        criteria: StoppingCriteriaList,
        *,
        config: GenerationConfig | None,
        tokenizer: PreTrainedTokenizerBase | None,
        options: Mapping[str, Any],
    ) -> tuple[GenerationConfig | None, dict[str, Any]]:
        """Turn stop strings into a criterion: the library drops the tokenizer of a custom loop."""
        own = self.model.generation_config
        given = options.get("stop_strings") or getattr(config, "stop_strings", None)
        strings = given or getattr(own, "stop_strings", None)
        if not strings:
            return config, dict(options)
        if tokenizer is None:
            raise ArgumentError("stop_strings: need the tokenizer; give tokenizer=")
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
        if config is not None:
            config = copy.deepcopy(config)
            config.stop_strings = None
        return config, {**options, "stop_strings": None}

    def _is_sampled(self, config: GenerationConfig | None, options: Mapping[str, Any]) -> bool:
        for value in (options.get("do_sample"), getattr(config, "do_sample", None)):
            if value is not None:
                return bool(value)
        return bool(getattr(self.model.generation_config, "do_sample", None))


def _pad_id(config: GenerationConfig) -> int:
    pad = getattr(config, "_pad_token_tensor", None)
    return 0 if pad is None else int(pad)
