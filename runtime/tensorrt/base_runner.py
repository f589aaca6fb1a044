"""Runs the verifier's engine: prompt chunks, token trees and single tokens over linear KV."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.tensorrt.engine_config import BaseEngineConfig
from wingbeat.runtime.tensorrt.graph_shapes import SHOWN, base_shapes, mask_name, shown_names
from wingbeat.runtime.tensorrt.linear_kv import LinearKV
from wingbeat.runtime.tensorrt.session import EngineSession, EngineStage, WrongInputError, check_batch
from wingbeat.runtime.tensorrt.stage_runner import StageRunner


class BasePass(NamedTuple):
    """Inputs of one pass, padded to the same number of rows for each sequence."""

    kv_rows: list[int]
    """KV row of each sequence."""
    starts: list[int]
    """Cache position of the first input row of each sequence."""
    token_ids: Tensor
    """Tokens of the rows, int64 [num_seqs, num_rows]."""
    positions: Tensor
    """int64 [num_seqs, num_rows], logical positions; or [num_seqs, 3, num_rows], RoPE positions on three axes."""
    selected: Tensor
    """int64 [num_seqs, num_selected]: rows whose logits are computed."""
    masks: dict[int, Tensor]
    """Maps each sliding window in tokens to its mask, bool [num_seqs, num_rows, capacity]: the keys that each row sees.
    """
    more: Mapping[str, Tensor] = MappingProxyType({})
    """Optional inputs of a runtime part by name; see `MoreInputs.of_pass`."""
    shown: tuple[Tensor, ...] = ()
    """Media inputs of the pass: the mask of rows with media embeddings, bool [num_seqs, num_rows], then a tensor
    [num_seqs, num_rows, hidden_size] for each name of `shown_names`. Empty if the pass has no media.
    """


class BaseOutput(NamedTuple):
    """Outputs of a pass."""

    logits: Tensor
    """Logits of the selected rows, [num_seqs, num_selected, vocab_size]."""
    hidden: Tensor | None
    """Taps of all rows, [num_seqs, num_rows, taps_size]; None if the graph has no taps."""


class BaseRunner:
    """Runs the verifier's engine.

    Args:
        session: session of the graph `eagle_base`.
        config: config of the graph.
        kv: KV rows of all sequences.
        graph_device: captures verification and plain decoding; None runs them eagerly.
        fixed: tensors at fixed addresses for the graph's optional inputs.
    """

    def __init__(
        self,
        session: EngineSession,
        config: BaseEngineConfig,
        kv: LinearKV,
        graph_device: GraphDevice | None = None,
        fixed: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self.config, self.more = config, config.more_inputs
        self.kv = kv
        shapes = base_shapes(
            [layer.attention() for layer in config.layers],
            config.windows,
            config.vocab_size,
            config.hidden_states_size,
            kv.capacity,
            config.torch_dtype,
            self.more,
            config.encoder,
            config.hidden_size,
        )
        self._shown_names = [] if config.encoder is None else [SHOWN, *shown_names(config.encoder)]
        self._zeros = torch.zeros(0, dtype=config.torch_dtype, device=session.device)
        self.stages = StageRunner(session, shapes, kv, config.limits, graph_device, fixed)

    def capture(self, num_nodes: int | None) -> bool:
        """Capture plain decoding, and verification of trees of `num_nodes` nodes. Returns False if a stage must run
        eagerly.

        Args:
            num_nodes: None if there are no trees.
        """
        done = [self.stages.capture(EngineStage.PLAIN, 1, 1)]
        if num_nodes is not None:
            done.append(self.stages.capture(EngineStage.VERIFY, num_nodes, num_nodes))
        return all(done)

    def stage_of(self, num_rows: int) -> EngineStage:
        """The stage whose shapes allow passes with this many rows per sequence.

        Raises:
            WrongInputError: num_rows exceeds the shapes of every stage.
        """
        limits = self.config.limits
        if num_rows == 1:
            return EngineStage.PLAIN
        if num_rows <= limits.max_verify_tree_size:
            return EngineStage.VERIFY
        if num_rows <= limits.max_input_len:
            return EngineStage.PREFILL
        raise WrongInputError(f"a pass of {num_rows} tokens a sequence: max_input_len is {limits.max_input_len}")

    def run(self, batch: BasePass) -> BaseOutput:
        """Run one pass; the keys and values of its rows are stored at consecutive positions, beginning at each
        sequence's start.

        Raises:
            WrongInputError: inputs differ in batch size, or are too large; the message names the tensor.
            CapacityExceededError: a sequence's KV row is too short for the pass.
        """
        masks = {mask_name(window): batch.masks[window] for window in self.config.windows}
        parts = {name: getattr(batch, name) for name in ("starts", "token_ids", "positions", "selected")}
        check_batch(len(batch.kv_rows), parts | masks)
        inputs = {
            "input_ids": batch.token_ids,
            "attention_pos_id": batch.positions,
            "last_token_ids": batch.selected,
            **{name: mask[:, None] for name, mask in masks.items()},
            **batch.more,
        }
        if self.config.encoder is not None:
            inputs |= dict(zip(self._shown_names, batch.shown or self._nothing_shown(batch.token_ids), strict=True))
        outputs = self.stages.run(self.stage_of(batch.token_ids.shape[1]), batch.kv_rows, batch.starts, inputs)
        return BaseOutput(outputs["logits"], outputs.get("hidden_states"))

    def _nothing_shown(self, token_ids: Tensor) -> tuple[Tensor, ...]:
        """Media inputs of a pass without media, all zero. The embeddings are views of a shared buffer, to which
        nothing may be written.
        """
        size, most = self.config.hidden_size, token_ids.numel() * self.config.hidden_size
        if most > self._zeros.numel():
            self._zeros = self._zeros.new_zeros(most)
        nothing = self._zeros[:most].view(*token_ids.shape, size)
        return torch.zeros_like(token_ids, dtype=torch.bool), *[nothing] * (len(self._shown_names) - 1)
