"""Logits of chosen rows from a model whose forward pass knows no `logits_to_keep`, such as Qwen2-Audio's."""

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def keep_logits(model: PreTrainedModel) -> None:
    """Let a model compute the logits of the rows in `logits_to_keep` alone; nothing where it does by itself.

    The argument is taken out of the model's, and the output matrix gets those rows of what it is given.
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
