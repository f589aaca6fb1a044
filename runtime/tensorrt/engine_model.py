"""A verifier that an engine runs: what the model runner, the scheduler and the drafter's client see of it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wingbeat.kernels.attention.reference import context_mask
from wingbeat.kernels.tree.reference import unpack_mask
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.tensorrt.base_runner import BasePass, BaseRunner
from wingbeat.runtime.tensorrt.engine_config import BaseEngineConfig, EngineDirectoryError
from wingbeat.runtime.tensorrt.linear_kv import LinearKV
from wingbeat.runtime.tensorrt.stage_runner import FIRST_ROW
from wingbeat.runtime.verifier.attention import AttentionSegment
from wingbeat.runtime.verifier.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import ForwardBatch, ModelOutput


@dataclass
class LoadedEngine(LoadedModel):
    """A verifier's engine directory in the place of its weights."""

    config: BaseEngineConfig | None = None
    on: torch.device | None = None

    @classmethod
    def of(cls, config: BaseEngineConfig, device: torch.device) -> "LoadedEngine":
        """What a directory says of its verifier."""
        return cls(
            model=None,
            name=config.name,
            layers=[layer.attention() for layer in config.layers],
            decoder_layers=nn.ModuleList(),
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            max_position_embeddings=min(config.max_position_embeddings, config.limits.max_kv_cache_capacity),
            eos_token_ids=frozenset(config.eos_token_ids),
            config=config,
            on=device,
        )

    @property
    def device(self) -> torch.device:
        return self.on

    @property
    def dtype(self) -> torch.dtype:
        return self.config.torch_dtype

    @property
    def description(self) -> str:
        return self.config.model_dump_json()


class EngineModel:
    """The forward pass of a verifier's engine; takes what `VerifierModel` takes, over linear KV.

    Args:
        tap_layers, kv_layers: that the drafter needs.

    Raises:
        EngineDirectoryError: the drafter needs hidden states that the engine was not exported with.
    """

    def __init__(
        self, runner: BaseRunner, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...], folder: Path
    ) -> None:
        config = runner.config
        if kv_layers:
            raise EngineDirectoryError(
                f"{folder}: the drafter reads keys and values of layers {kv_layers}: engines do not return them"
            )
        if tap_layers and tap_layers != config.tap_layers:
            raise EngineDirectoryError(
                f"{folder}: tap_layers is {config.tap_layers}: the drafter needs {tap_layers}; build it anew with "
                "this drafter"
            )
        self.runner = runner
        self.tap_layers, self.kv_layers = tap_layers, ()
        self.taps_size = config.hidden_states_size if tap_layers else 0

    def __call__(self, batch: ForwardBatch) -> ModelOutput:
        """Run the batch, segment by segment; KV is written into the rows that block tables name."""
        num_tokens = batch.token_ids.shape[1]
        wanted = None if batch.logits_rows is None else batch.logits_rows.tolist()
        num_logits = num_tokens if wanted is None else len(wanted)
        config, logits, taps = self.runner.config, None, None
        for segment in batch.attention.segments:
            shape = (segment.num_reqs, segment.num_query)
            end = segment.start + shape[0] * shape[1]
            positions = batch.positions[0, segment.start : end].view(shape)
            picked = _picked(segment, wanted)
            masks = {window: self._mask(segment, window) for window in config.windows}
            # The first row of a chunk or a tree is stored at its own position.
            ids = batch.token_ids[0, segment.start : end].view(shape)
            rows, starts = segment.block_tables[:, 0].tolist(), positions[:, 0].contiguous()
            if not any(rows):
                rows, positions, starts = self._nobodys(positions)
            output = self.runner.run(rows, BasePass(ids, positions, starts, picked.selected, masks))
            if logits is None:
                logits = output.logits.new_empty(num_logits, config.vocab_size)
                if self.taps_size:
                    taps = output.hidden.new_empty(num_tokens, self.taps_size)
            if picked.into:
                logits[picked.into] = output.logits.flatten(0, 1)[picked.rows]
            if taps is not None:
                taps[segment.start : end] = output.hidden.flatten(0, 1)
        return ModelOutput(logits, taps)

    def remove_taps(self) -> None:
        """See `VerifierModel.remove_taps`; there are no hooks."""

    def _nobodys(self, positions: Tensor) -> tuple[list[int], Tensor, Tensor]:
        """Rows for a pass of nobody's, which is measured: behind what any sequence keeps in them."""
        num_reqs, num_query = positions.shape
        capacity, most = self.runner.kv.block_size, self.runner.config.max_position_embeddings
        starts = torch.full_like(positions[:, 0], capacity - num_query)
        return list(range(FIRST_ROW, FIRST_ROW + num_reqs)), positions.clamp_max(most - 1), starts

    def _mask(self, segment: AttentionSegment, window: int) -> Tensor:
        """bool [num_reqs, num_query, capacity]: what each row sees."""
        if segment.masks:
            return segment.masks[window][..., : self.runner.kv.block_size] == 0
        num_query, positions = segment.num_query, segment.positions
        if segment.mask_words is None:
            visible = torch.ones(num_query, num_query, dtype=torch.bool, device=positions.device).tril()
            visible = visible.expand(segment.num_reqs, -1, -1)
        else:
            visible = unpack_mask(segment.mask_words, num_query)
        capacity, dtype = self.runner.kv.block_size, torch.float32
        return context_mask(positions, segment.num_context, visible, capacity, window or None, dtype) == 0


class _Picked(NamedTuple):
    """Rows of a segment whose logits are wanted."""

    selected: Tensor
    """int64 [num_reqs, n]"""
    rows: list[int]
    """Of what the pass returns, flat."""
    into: list[int]
    """Rows of the batch's logits."""


def _picked(segment: AttentionSegment, wanted: list[int] | None) -> _Picked:
    num_reqs, num_query, start = segment.num_reqs, segment.num_query, segment.start
    device = segment.block_tables.device
    count = num_reqs * num_query
    if wanted is None or (num_reqs > 1 or wanted[start : start + count] == list(range(start, start + count))):
        # Every row of trees is wanted, and these lie before all chunks.
        selected = torch.arange(num_query, device=device).expand(num_reqs, -1).contiguous()
        return _Picked(selected, list(range(count)), list(range(start, start + count)))
    found = [(row - start, index) for index, row in enumerate(wanted) if start <= row < start + count]
    rows = sorted({row for row, _ in found}) or [count - 1]
    places = {row: place for place, row in enumerate(rows)}
    return _Picked(
        torch.tensor([rows], device=device), [places[row] for row, _ in found], [index for _, index in found]
    )


def engine_limits(config: EngineConfig, engine: BaseEngineConfig) -> EngineConfig:
    """Limits of an engine on linear KV: one block a sequence, as long as the engine's rows, and none shared.

    Raises:
        ValueError: a limit is above the engine's, or a setting is not to be had; names both.
    """
    limits = engine.limits
    if config.lower_max_model_len:
        longest = min(config.max_model_len, limits.max_kv_cache_capacity, engine.max_position_embeddings)
        config = replace(config, max_model_len=longest)
    for name, value, field, most in (
        ("max_model_len", config.max_model_len, "max_kv_cache_capacity", limits.max_kv_cache_capacity),
        ("verify_tree_size", config.speculation.num_nodes, "max_verify_tree_size", limits.max_verify_tree_size),
    ):
        if value > most:
            raise ValueError(f"{name} is {value}: the engine was built with {field} {most}; lower it or build anew")
    if config.compile:
        raise ValueError("compile is True: the backend tensorrt runs engines, torch.compile has nothing to do")
    if config.cuda_graphs:
        raise ValueError("cuda_graphs is True: the backend tensorrt captures its own stages")
    return replace(
        config,
        max_num_batched_tokens=min(config.max_num_batched_tokens, limits.max_input_len),
        block_size=limits.capacity,
        num_kv_blocks=config.max_num_seqs + 1,
        lower_max_model_len=False,
        enable_prefix_caching=False,
        cuda_graphs=False,
    )


def linear_kv(loaded: LoadedEngine, config: EngineConfig) -> LinearKV:
    """KV of every sequence of an engine."""
    return LinearKV(loaded.layers, config.num_kv_blocks, config.block_size, loaded.dtype, loaded.device)
