"""The forward pass of a verifier's engine, which replaces `VerifierModel`."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.attention.reference import context_mask
from wingbeat.kernels.tree.reference import unpack_mask
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.round.rows import Feature, ModelOutput, Placed, Rows, Segment
from wingbeat.runtime.tensorrt.base_runner import BaseOutput, BasePass, BaseRunner
from wingbeat.runtime.tensorrt.engine_config import EngineDirectoryError
from wingbeat.runtime.tensorrt.linear_kv import RowCache
from wingbeat.runtime.tensorrt.stage_runner import FIRST_ROW


class KvRows(NamedTuple):
    """KV row to which each row of a batch belongs."""

    slots: Tensor
    """int64 [num_rows]: slot of each row of the batch."""
    fresh: frozenset[int] = frozenset()
    """Slots whose KV rows do not hold the KV of their current sequences yet, so that cached prefixes must be copied to
    these rows from pages.
    """


class LinearRows(Feature):
    """Feature of a verifier that runs as an engine: each slot has a row of linear KV."""

    kind = KvRows

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}
        """Epoch of the sequence that each slot's KV row belongs to."""

    def column(self, placed: Placed) -> KvRows:
        """See `Feature.column`."""
        if placed.plan is None:
            return KvRows(placed.slots)
        now = {seq.slot: seq.epoch for seq in (*placed.plan.decodes, *(chunk.seq for chunk in placed.plan.chunks))}
        fresh = frozenset(slot for slot, epoch in now.items() if self._epochs.get(slot) != epoch)
        self._epochs |= now
        return KvRows(placed.slots, fresh)


class EngineModel:
    """The forward pass of a verifier's engine: the interface of `VerifierModel` over linear KV.

    Args:
        runner: runs the engine.
        cache: the rows that the runner reads and writes.
        tap_layers, kv_layers: layers that the drafter reads.
        folder: the engine directory, for messages.

    Raises:
        EngineDirectoryError: the drafter needs hidden states that the engine does not output.
    """

    def __init__(
        self,
        runner: BaseRunner,
        cache: RowCache,
        tap_layers: tuple[int, ...],
        kv_layers: tuple[int, ...],
        folder: Path,
    ) -> None:
        config = runner.config
        if kv_layers:
            raise EngineDirectoryError(
                f"{folder}: the drafter reads keys and values of layers {kv_layers}: engines do not return them"
            )
        if tap_layers and tap_layers != config.tap_layers:
            raise EngineDirectoryError(
                f"{folder}: tap_layers is {config.tap_layers}: the drafter needs {tap_layers}; rebuild the engine with "
                "this drafter"
            )
        self.runner, self.cache = runner, cache
        self.tap_layers, self.kv_layers = tap_layers, ()
        self.taps_size = config.hidden_states_size if tap_layers else 0

    def __call__(self, batch: Rows) -> ModelOutput:
        """Run the batch, segment by segment; KV is written to the rows of the sequences' slots."""
        wanted = None if batch.logits_rows is None else batch.logits_rows.tolist()
        segments = batch.segments
        outputs = []
        for segment in segments:
            picked = _picked(segment, wanted)
            outputs.append((picked, self._run(batch, segment, picked.selected)))
        if wanted is None and len(segments) == 1:
            output = outputs[0][1]
            return ModelOutput(output.logits.flatten(0, 1), output.hidden.flatten(0, 1) if self.taps_size else None)
        num_logits = batch.token_ids.shape[1] if wanted is None else len(wanted)
        logits = outputs[0][1].logits.new_empty(num_logits, self.runner.config.vocab_size)
        for picked, output in outputs:
            if picked.into:
                logits[picked.into] = output.logits.flatten(0, 1)[picked.rows]
        # The segments have the order of the batch's rows, so their outputs can be concatenated.
        taps = [output.hidden.flatten(0, 1) for _, output in outputs] if self.taps_size else None
        return ModelOutput(logits, None if taps is None else torch.cat(taps))

    def _run(self, batch: Rows, segment: Segment, selected: Tensor) -> BaseOutput:
        shape = (segment.num_reqs, segment.num_query)
        rows = slice(segment.start, segment.start + shape[0] * shape[1])
        positions = segment.positions[:, -shape[1] :]
        rotated = self._rotated(batch, rows, shape)
        masks = {window: self._mask(segment, window) for window in self.runner.config.windows}
        owners = batch.columns.get(KvRows)
        if owners is None:
            numbers, rotated = self._nobodys(rotated)
        else:
            # The KV of the first row of a chunk or a tree is stored at that row's position.
            numbers = torch.stack((owners.slots[rows].view(shape)[:, 0] + FIRST_ROW, positions[:, 0]))
        kv_rows, starts = numbers.tolist()  # the host waits for the device only here
        if owners is not None:
            self.cache.place(numbers[0], segment.block_tables, numbers[1], shape[1])
            for index, row in enumerate(kv_rows):
                if row - FIRST_ROW in owners.fresh:
                    own = slice(index, index + 1)
                    self.cache.linear.fill(numbers[0, own], segment.block_tables[own], starts[index])
        ids = batch.token_ids[0, rows].view(shape)
        more = {} if self.runner.more is None else self.runner.more.of_pass(batch, rows, shape)
        shown = self._shown(batch, rows, shape)
        output = self.runner.run(BasePass(kv_rows, starts, ids, rotated, selected, masks, more, shown))
        if owners is not None:
            self.cache.linear.keep(*numbers, batch.slot_mapping[rows].view(shape))
        return output

    def _rotated(self, batch: Rows, rows: slice, shape: tuple[int, int]) -> Tensor:
        """RoPE positions of a segment's rows: int64 [num_reqs, num_query], or [num_reqs, 3, num_query] by axis."""
        encoder, found = self.runner.config.encoder, batch.positions[..., rows]
        if encoder is None or not encoder.num_axes:
            return found[0].view(shape)
        # For rows without media all axes are equal.
        axes = found.view(-1, *shape).transpose(0, 1)
        return axes.expand(-1, encoder.num_axes, -1).contiguous()

    def _shown(self, batch: Rows, rows: slice, shape: tuple[int, int]) -> tuple[Tensor, ...]:
        """Media embeddings of a segment's rows; see `BasePass.shown`."""
        media = first_result("embedded_rows", batch.columns)
        if media is None:
            return ()
        num_rows, size = batch.token_ids.shape[1], self.runner.config.hidden_size
        is_shown = torch.zeros(num_rows, dtype=torch.bool, device=media.rows.device).index_fill_(0, media.rows, True)
        spread = (
            part.new_zeros(num_rows, size).index_copy_(0, media.rows, part)[rows].view(*shape, size)
            for part in (media.embeddings, *media.deep)
        )
        return is_shown[rows].view(shape), *spread

    def remove_taps(self) -> None:
        """See `VerifierModel.remove_taps`; an engine has no hooks."""

    def _nobodys(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the KV rows and starts, int64 [2, num_reqs], and the RoPE positions of a timed pass that runs for no
        sequence. The starts lie after all positions at which sequences keep KV, so that the pass overwrites none.
        """
        num_reqs, num_query = positions.shape[0], positions.shape[-1]
        most = self.runner.config.max_position_embeddings
        rows = torch.arange(FIRST_ROW, FIRST_ROW + num_reqs, device=positions.device)
        starts = torch.full_like(rows, self.runner.kv.capacity - num_query)
        return torch.stack((rows, starts)), positions.clamp_max(most - 1)

    def _mask(self, segment: Segment, window: int) -> Tensor:
        """bool [num_reqs, num_query, capacity]: keys that each row sees."""
        num_query, positions = segment.num_query, segment.positions
        if segment.mask_words is None:
            visible = torch.ones(num_query, num_query, dtype=torch.bool, device=positions.device).tril()
            visible = visible.expand(segment.num_reqs, -1, -1)
        else:
            visible = unpack_mask(segment.mask_words, num_query)
        capacity, dtype = self.runner.kv.capacity, torch.float32
        return context_mask(positions, segment.num_context, visible, capacity, window or None, dtype) == 0


class _Picked(NamedTuple):
    """The rows of a segment whose logits are computed."""

    selected: Tensor
    """Indices of the rows within each request, int64 [num_reqs, n]."""
    rows: list[int]
    """Indices into the flattened output of the pass."""
    into: list[int]
    """Indices of the rows of the batch's logits to which the outputs are written."""


def _picked(segment: Segment, wanted: list[int] | None) -> _Picked:
    num_reqs, num_query, start = segment.num_reqs, segment.num_query, segment.start
    device = segment.block_tables.device
    count = num_reqs * num_query
    if wanted is None or num_reqs > 1 or wanted[start : start + count] == list(range(start, start + count)):
        # The logits of every row are computed. Trees, which need the logits of all their rows, come before all chunks
        # in a batch, so a tree row's index in the batch is also its index in the batch's logits.
        selected = torch.arange(num_query, device=device).expand(num_reqs, -1).contiguous()
        return _Picked(selected, list(range(count)), list(range(start, start + count)))
    found = [(row - start, index) for index, row in enumerate(wanted) if start <= row < start + count]
    rows = sorted({row for row, _ in found}) or [count - 1]
    places = {row: place for place, row in enumerate(rows)}
    return _Picked(
        torch.tensor([rows], device=device), [places[row] for row, _ in found], [index for _, index in found]
    )
