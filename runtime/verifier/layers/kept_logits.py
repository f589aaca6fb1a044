"""Restricts logits to chosen rows for models whose forward has no `logits_to_keep`, such as Qwen2-Audio."""

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def keep_logits(model: PreTrainedModel) -> None:
    """Makes a model compute only the logits of the rows in `logits_to_keep`, if its forward has no such argument.

    A pre-hook removes the argument before the model's forward; another pre-hook selects the rows before the output
    head.
    """
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return
    wanted: list[Tensor | int] = [0]

    def take(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        wanted[0] = kwargs.pop("logits_to_keep", 0)
        return args, kwargs

    def cut(module: nn.Module, args: tuple) -> tuple:
        rows = wanted[0]
        return (args[0][:, slice(-rows, None) if isinstance(rows, int) else rows], *args[1:])

    model.register_forward_pre_hook(take, with_kwargs=True)
    model.get_output_embeddings().register_forward_pre_hook(cut)
