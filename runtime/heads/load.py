"""Loads checkpoints of EAGLE heads, and converts each supported layout to the same canonical head.

Unknown, missing and mis-shaped tensors raise errors. A log line states how the head is read. `layouts` recognises a
checkpoint's layout; `head_config` and `conventions` interpret the fields of its config.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.eagle1 import Eagle1Head
from wingbeat.runtime.heads.eagle3 import EagleHead
from wingbeat.runtime.heads.files import (
    CheckpointError,
    fields_refused,
    find_folder,
    read_config,
    read_shapes,
    read_tensors,
)
from wingbeat.runtime.heads.head_config import aux_layer_ids, conventions, has_axes, head_config
from wingbeat.runtime.heads.layer import DecoderHeadConfig
from wingbeat.runtime.heads.layouts import Family, Layout, file_tensors, holds_head, recognise
from wingbeat.runtime.heads.plain_weights import plain_shapes, plain_tensors
from wingbeat.runtime.heads.rotary import in_turning_order
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.parts import first_result

logger = logging.getLogger(__name__)


class Vocabularies(Protocol):
    """The fields of a head's config that `fit_vocabulary` reads."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def draft_vocab_size(self) -> int: ...


@dataclass(frozen=True)
class HeadCheckpoint:
    """A head's folder, with tensor shapes but without values."""

    folder: Path
    layout: Layout
    raw: Mapping[str, Any]
    """Fields of config.json."""
    shapes: Mapping[str, tuple[int, ...]]

    def conventions(self, num_layers: int, target_hidden_size: int) -> tuple[HeadConvention, ...]:
        """The conventions under which the head may be read for a target of that shape, most likely first.

        Raises:
            CheckpointError: the tap layers do not exist in that target.
        """
        return conventions(self.raw, self.layout, self.shapes, num_layers, target_hidden_size)

    def config(self, target_hidden_size: int, convention: HeadConvention) -> DecoderHeadConfig:
        """The canonical config under one convention.

        Raises:
            CheckpointError: a field is missing, not supported, or does not fit the target.
        """
        return head_config(self.raw, self.layout, self.shapes, target_hidden_size, convention)

    @contextmanager
    def says_whose(self, target: TargetDescription) -> Iterator[None]:
        """In this context, the message of a CheckpointError is prefixed with the verifier for which the head was made,
        if that is not the given verifier.
        """
        try:
            yield
        except CheckpointError as error:
            words = first_result("another_verifier", self.raw, self.shapes, target, self.layout.family is Family.EAGLE1)
            raise (error if words is None else type(error)(f"{words}: {error}")) from error.__cause__


def read_checkpoint(path: str | Path) -> HeadCheckpoint:
    """Read config and tensor shapes of a folder or a hub repository.

    Raises:
        CheckpointError: the folder is unreadable, or holds no head.
        UnsupportedCheckpointError: the head is of a known family that is not supported.
    """
    folder = find_folder(path)
    raw = read_config(folder)
    shapes = plain_shapes(raw, read_shapes(folder))
    layout = recognise(raw, shapes)
    return HeadCheckpoint(folder, layout, raw, {name: shapes[name] for name in shapes if name not in layout.ignored})


def is_head_folder(path: str | Path) -> bool:
    """Whether a folder holds a draft head, supported or not, rather than a whole language model.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    folder = find_folder(path)
    return holds_head(read_config(folder), read_shapes(folder))


def head_conventions(path: str | Path, target: TargetDescription, num_drafted: int = 1) -> tuple[HeadConvention, ...]:
    """Conventions that a head's files allow, most likely first; a single convention if nothing is ambiguous.

    Args:
        path: folder or hub name.
        target: the verifier.
        num_drafted: number of tokens that each convention must be able to draft; EAGLE heads draft chains of any
            length.

    Raises:
        CheckpointError: the folder is unreadable, unsupported, or does not fit the target.
    """
    checkpoint = read_checkpoint(path)
    with checkpoint.says_whose(target):
        found = checkpoint.conventions(target.num_layers, target.hidden_size)
        check_vocabulary(checkpoint.config(target.hidden_size, found[0]), target)
        return found


def load_eagle_head(
    path: str | Path,
    target: TargetDescription,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    convention: HeadConvention | None = None,
) -> EagleHead | Eagle1Head:
    """Load a head of any supported layout, in evaluation mode, from a folder or a hub name.

    Args:
        path: folder or hub name.
        target: the verifier. A file without an embedding uses the verifier's embedding, without a copy. A file without
            an lm_head uses the verifier's lm_head if the head drafts the whole vocabulary.
        dtype, device: dtype and device of the loaded weights.
        convention: one of `head_conventions`; None means the first.

    Raises:
        CheckpointError: the family or the config is not supported, or a tensor is missing, unexpected or mis-shaped.
    """
    checkpoint = read_checkpoint(path)
    with checkpoint.says_whose(target):
        readings = checkpoint.conventions(target.num_layers, target.hidden_size)
        convention = convention or readings[0]
        config = checkpoint.config(target.hidden_size, convention)
        tensors = plain_tensors(checkpoint.raw, read_tensors(checkpoint.folder))
        with torch.device("meta"), fields_refused():
            head = config.new_head()
        tensors = {name: tensor for name, tensor in tensors.items() if name not in checkpoint.layout.ignored}
        token_ids, borrowed = fit_vocabulary(tensors, config, target)
        state = canonical_state(tensors, head, partial(file_tensors, checkpoint.layout, config))
        state = in_turning_order(state, config)
    # `assign` keeps a borrowed embedding shared with the target instead of copying it.
    head.load_state_dict(
        {k: v.to(device, dtype) for k, v in state.items()} | {"draft_token_ids": token_ids}, assign=True
    )
    head.reset_rope(device)
    head = head.to(device).eval().requires_grad_(False).with_convention(convention)
    _log(path, checkpoint, head, len(readings), borrowed)
    return head


def _log(
    path: str | Path, checkpoint: HeadCheckpoint, head: EagleHead | Eagle1Head, num_readings: int, borrowed: list[str]
) -> None:
    config, convention, rope = head.config, head.convention, head.config.rope_parameters
    ids, _ = aux_layer_ids(checkpoint.raw)
    origin = "from the config" if ids is not None else "by default: the config has none"
    if checkpoint.layout.family is Family.EAGLE1:
        origin = "the final norm's output"
    logger.info(
        "drafter %s: %s in %s layout, taps enter layers %s (%s), draft vocabulary %d of %d, norm_output=%s, "
        "norm_before_residual=%s, RoPE %s of base %g%s, %s, from the target: %s",
        path,
        checkpoint.layout.family,
        checkpoint.layout.name,
        list(convention.tap_layers),
        origin,
        config.draft_vocab_size,
        config.vocab_size,
        convention.norm_output,
        convention.norm_before_residual,
        rope["rope_type"],
        rope["rope_theta"],
        " on three axes" if has_axes(checkpoint.raw) else "",
        "one reading" if num_readings == 1 else f"one of {num_readings} readings",
        ", ".join(borrowed) or "nothing",
    )


def fit_vocabulary(
    tensors: dict[str, Tensor], config: Vocabularies, target: TargetDescription
) -> tuple[Tensor, list[str]]:
    """Remove the token map from a file's tensors, check it against the target's vocabulary, and add the tensors
    borrowed from the target.

    Returns:
        The head's token map, and the names of the tensors borrowed from the target.

    Raises:
        CheckpointError: the target has another vocabulary size, or the token map contains ids outside the vocabulary.
    """
    check_vocabulary(config, target)
    token_ids = draft_token_ids(tensors, config)
    lent = {"embed_tokens.weight": target.embedding}
    if config.draft_vocab_size == config.vocab_size:
        lent["lm_head.weight"] = target.lm_head
    # Tensors that the file contains are not borrowed.
    found = {name: lend() for name, lend in lent.items() if name not in tensors}
    borrowed = {name: tensor.detach() for name, tensor in found.items() if tensor is not None}
    tensors |= borrowed
    return token_ids, list(borrowed)


def check_vocabulary(config: Vocabularies, target: TargetDescription) -> None:
    """Raises CheckpointError if head and target have vocabularies of different sizes."""
    if config.vocab_size != target.vocab_size:
        raise CheckpointError(f"vocab_size={config.vocab_size} differs from the target's {target.vocab_size}")


def draft_token_ids(tensors: dict[str, Tensor], config: Vocabularies) -> Tensor:
    """Removes d2t and t2d from the tensors, and returns the target id of each draft id, int64 [draft_vocab_size]."""
    size = config.draft_vocab_size
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if offsets is None:
        if size != config.vocab_size:
            raise CheckpointError(f"missing tensor d2t: draft_vocab_size={size} of vocab_size={config.vocab_size}")
        offsets = torch.zeros(size, dtype=torch.int64)
    check_shape("d2t", offsets, (size,))
    token_ids = offsets.long() + torch.arange(size)
    if bool(((token_ids < 0) | (token_ids >= config.vocab_size)).any()):
        raise CheckpointError(f"d2t points outside the target's vocabulary of {config.vocab_size}")
    if len(token_ids.unique()) != size:
        raise CheckpointError("d2t maps two draft ids to the same target id")
    # Some tools write t2d without setting its values if the draft vocabulary is the whole vocabulary, so it is not
    # checked then.
    if mask is not None and size != config.vocab_size:
        check_shape("t2d", mask, (config.vocab_size,))
        if not torch.equal(mask.bool().nonzero().flatten(), token_ids.sort().values):
            raise CheckpointError("t2d marks other target ids than those that d2t maps to")
    return token_ids


def canonical_state(
    tensors: dict[str, Tensor], head: nn.Module, names_of: Callable[[str, Tensor], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Converts a file's tensors, without the token map, to a head's state dict.

    Args:
        tensors: tensors of the file by name.
        head: the head, for names and shapes.
        names_of: `file_tensors` bound to a layout and a config.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not used.
    """
    state = {}
    unused = set(tensors)
    for canonical, expected in head.state_dict().items():
        if canonical == "draft_token_ids":
            continue
        parts = []
        for name, part in names_of(canonical, expected).items():
            if name not in tensors:
                raise CheckpointError(f"missing tensor {name}")
            check_shape(name, tensors[name], tuple(part.shape))
            unused.discard(name)
            parts.append(tensors[name])
        state[canonical] = parts[0] if len(parts) == 1 else torch.cat(parts)
    if unused:
        raise CheckpointError(f"unexpected tensor {', '.join(sorted(unused))}")
    return state


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raises CheckpointError if a tensor of a file does not have the expected shape."""
    if tuple(tensor.shape) != expected:
        raise CheckpointError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {expected}")
