"""What an export has to know of a base model, without loading all of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from medusa_train.base_model.features import (
    LogitRule,
    candidate_rules,
    check_features,
    output_projection,
)
from medusa_train.base_model.fingerprint import base_fingerprint, weight_files
from medusa_train.base_model.load import load_base_model, load_tokenizer
from medusa_train.errors import InputError
from medusa_train.heads.config import BaseIdentity, HeadsConfig
from medusa_train.plan.model_shape import load_config, meta_model, one_layer_config


@dataclass(frozen=True)
class BaseFacts:
    """A base model by its config.

    Attributes:
        name_or_path: hub id or directory.
        gguf_file: the GGUF file in it, if it is one.
        revision: on the hub.
        model: without weights.
        hidden_size: D.
        vocab_size: V, rows of ``lm_head``.
        lm_head_bias: whether it has a bias.
        logit_rule: what the model does after ``lm_head``.
        trust_remote_code: whether code that comes with the model may run.
    """

    name_or_path: str
    gguf_file: str | None
    revision: str | None
    model: PreTrainedModel
    hidden_size: int
    vocab_size: int
    lm_head_bias: bool
    logit_rule: LogitRule
    trust_remote_code: bool = False

    @property
    def has_own_code(self) -> bool:
        """Whether the model's class comes with its files."""
        return type(self.model).__module__.startswith("transformers_modules.")

    @property
    def config(self) -> Mapping[str, Any]:
        """The values of its config that engines compare with."""
        text = self.model.config.get_text_config(decoder=True)
        return {"model_type": self.model.config.model_type, "vocab_size": text.vocab_size}

    def fingerprint(self) -> str:
        """The fingerprint of its files."""
        return base_fingerprint(self.name_or_path, gguf_file=self.gguf_file, revision=self.revision)


def read_facts(
    identity: BaseIdentity, *, base_model: str | None = None, trust_remote_code: bool = False
) -> BaseFacts:
    """The facts of the base that heads name, or of ``base_model``.

    Args:
        identity: what the heads name.
        base_model: hub id or directory, instead.
        trust_remote_code: run code that comes with the model.

    Raises:
        InputError: its config is not there, cannot be read, or needs code of its own.
    """
    is_named = base_model is None
    name = base_model or identity.name_or_path
    gguf_file = identity.gguf_file if is_named else None
    revision = identity.revision if is_named else None
    try:
        config = load_config(
            name, gguf_file=gguf_file, revision=revision, trust_remote_code=trust_remote_code
        )
    except InputError as error:
        raise InputError(f"{error}; --base-model says where the base is") from error
    model = meta_model(config, trust_remote_code=trust_remote_code)
    weight, bias = output_projection(model)
    return BaseFacts(
        name_or_path=name,
        gguf_file=gguf_file,
        revision=revision,
        model=model,
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0],
        lm_head_bias=bias is not None,
        logit_rule=_logit_rule(config, trust_remote_code=trust_remote_code),
        trust_remote_code=trust_remote_code,
    )


def check_shape(facts: BaseFacts, config: HeadsConfig, *, where: Path) -> None:
    """Refuse heads of another shape than the base's.

    Raises:
        InputError: another D or V.
    """
    for name, got, wanted in (
        ("hidden size", config.hidden_size, facts.hidden_size),
        ("rows of lm_head", config.vocab_size, facts.vocab_size),
    ):
        if got != wanted:
            raise InputError(
                f"{where}: heads for {got} {name}, but {facts.name_or_path} has {wanted}; give the "
                "base that they were trained on (--base-model)"
            )


def read_tokenizer(facts: BaseFacts) -> PreTrainedTokenizerBase:
    """The base's tokenizer.

    Raises:
        InputError: there is none.
    """
    return load_tokenizer(
        facts.name_or_path,
        gguf_file=facts.gguf_file,
        revision=facts.revision,
        trust_remote_code=facts.trust_remote_code,
    )


def read_lm_head(facts: BaseFacts) -> Tensor:
    """[V, D] the base's ``lm_head``: that tensor alone where it can be told from the others.

    Raises:
        InputError: the base cannot be loaded.
    """
    if facts.gguf_file is None:
        found = _stored_lm_head(facts)
        if found is not None:
            return found
    base = load_base_model(
        facts.name_or_path,
        gguf_file=facts.gguf_file,
        revision=facts.revision,
        trust_remote_code=facts.trust_remote_code,
        device="cpu",
    )
    return output_projection(base.model)[0].detach()


def _stored_lm_head(facts: BaseFacts) -> Tensor | None:
    """The tensor in the base's safetensors files, or None where its name is not certain."""
    model = facts.model
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    module = model.get_input_embeddings() if tied else model.get_output_embeddings()
    names = [f"{name}.weight" for name, part in model.named_modules() if part is module]
    for path in weight_files(facts.name_or_path, revision=facts.revision):
        if path.suffix != ".safetensors":
            return None
        with safe_open(path, framework="pt") as file:
            for name in set(names) & set(file.keys()):
                tensor: Tensor = file.get_tensor(name)
                fits = tuple(tensor.shape) == (facts.vocab_size, facts.hidden_size)
                return tensor if fits and tensor.is_floating_point() else None
    return None


def _logit_rule(config: PretrainedConfig, *, trust_remote_code: bool) -> LogitRule:
    """What the architecture does after ``lm_head``; a model of one layer with random weights shows.

    It is code in the model's forward, so where the config names a scale or a cap the code is run.
    """
    if candidate_rules(config) == [LogitRule()]:
        return LogitRule()
    small = AutoModelForCausalLM.from_config(
        one_layer_config(config), trust_remote_code=trust_remote_code
    )
    # transformers wraps .float() so that mypy cannot read it.
    nn.Module.float(small)
    return check_features(small)
