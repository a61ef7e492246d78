"""A base model of which every process holds a part: DeepSpeed's ZeRO-3.

The weights are read into parts at once, so no process ever holds the whole model, and each layer is
put together for its own forward pass only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from medusa_train.base_model.features import decoder


@contextmanager
def sharded_loading(config: Mapping[str, Any], *, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Let ``from_pretrained`` inside the block shard what it reads.

    Args:
        config: DeepSpeed configuration of the training, with a ZeRO stage of 3.
        dtype: of the base's weights.

    Yields:
        The configuration for :func:`run_sharded`.
    """
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    zero = dict(config["zero_optimization"])
    zero.pop("offload_optimizer", None)
    for name in ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"):
        if zero.get(name) == "auto":
            del zero[name]
    if zero.get("reduce_bucket_size") == "auto":
        del zero["reduce_bucket_size"]
    own = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
    }
    # transformers keeps a weak reference: sharding lasts as long as this object.
    keep = HfDeepSpeedConfig(own)
    yield own
    del keep


@contextmanager
def whole_layers(model: PreTrainedModel) -> Iterator[None]:
    """Make each module of a sharded model whole while it runs inside the block, without gradients.

    For a model that is not trained yet: the engine that will do this for it comes later.
    """
    handles = []

    def gather(module: nn.Module, _inputs: Any) -> None:
        own: list[Any] = list(module.parameters(recurse=False))
        own[0].all_gather(own)

    def release(module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        own: list[Any] = list(module.parameters(recurse=False))
        own[0].partition(own)

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            handles.append(module.register_forward_pre_hook(gather))
            handles.append(module.register_forward_hook(release))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_sharded(
    model: PreTrainedModel, config: Mapping[str, Any], *, check: Callable[[], Any]
) -> Any:
    """Make the layers of a sharded model whole while they run.

    Args:
        model: loaded inside :func:`sharded_loading`.
        config: what that yielded.
        check: called while the model as a whole can run; later only its decoder does.

    Returns:
        What ``check`` returned.
    """
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, config=dict(config))
    result = check()
    coordinator = engine.optimizer.get_param_coordinator
    # DeepSpeed follows the order of the layers from the start of the root's forward pass, and ours
    # starts at the decoder.
    decoder(model).register_forward_pre_hook(lambda *_: coordinator().reset_step())
    return result
