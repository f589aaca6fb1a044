"""Contents of a prefix in an engine, as tensors by name.

These are KV of whole blocks, recurrent state after these blocks, and taps.

`layers.N.keys` and `layers.N.values` are [num_tokens, num_kv_heads, dim], stored as uint8 if the pool is float8_e4m3fn.
`states.L.KIND.I` is a part of layer L's recurrent state. `taps.LAYERS` [num_tokens, taps_size] are the taps for a
drafter that needs the layers `LAYERS`.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wingbeat.runtime.drafters.base import DrafterNeeds
    from wingbeat.runtime.kv.pool import KVCache
    from wingbeat.runtime.prefixes.recorded_contexts import RecordedContexts
    from wingbeat.runtime.round.rows import KeepingFeature

Contents = dict[str, Tensor]
TAPS = "taps."


class PrefixContents:
    """Reads and writes contents of prefixes in an engine's memory.

    Args:
        states: feature that stores the model's recurrent states; None if the model has no recurrent states.
        contexts: taps recorded for drafters.
        needs: layers that the engine's drafter needs; these decide which of a prefix's taps the engine can use.
    """

    def __init__(
        self, cache: "KVCache", states: "KeepingFeature | None", contexts: "RecordedContexts", needs: "DrafterNeeds"
    ) -> None:
        self._cache = cache
        self._states = states
        self._contexts = contexts
        taps, keys = ("-".join(map(str, layers)) for layers in (needs.tap_layers, needs.kv_layers))
        self._taps_name = f"{TAPS}{taps}+{keys}"

    @torch.no_grad()
    def read(self, blocks: Sequence[int], taps: Tensor | None) -> Contents:
        """Copies the contents of cached blocks to the host, and adds the recorded taps."""
        rows = torch.tensor(blocks)
        found = {
            name: part.index_select(0, rows.to(part.device)).flatten(0, 1).cpu() for name, part in self._pool_parts()
        }
        if self._states is not None:
            kept = self._states.kept(blocks)
            found |= {f"states.{name}": part.to("cpu", copy=True) for name, part in kept.items()}
        return found if taps is None else found | {self._taps_name: taps}

    def taps_in(self, contents: Contents) -> Tensor | None:
        """Returns the taps for the engine's own drafter.

        Returns None if no taps were recorded, or only taps for a drafter with other needs.
        """
        return contents.get(self._taps_name)

    @torch.no_grad()
    def write(self, blocks: Sequence[int], contents: Contents) -> bool:
        """Writes contents into live blocks that are not cached yet.

        Returns False if no row is free for the recurrent state.

        Args:
            contents: tensors that passed `mismatch`.
        """
        rows, size = torch.tensor(blocks), self._cache.block_size
        for name, part in self._pool_parts():
            part[rows.to(part.device)] = contents[name].unflatten(0, (len(blocks), size)).to(part.device)
        if self._states is None:
            return True
        kind = "states."
        state = {name.removeprefix(kind): part for name, part in contents.items() if name.startswith(kind)}
        return self._states.put(blocks, state)

    def mismatch(self, num_blocks: int, contents: Contents) -> str | None:
        """Returns why `contents` cannot be the contents of `num_blocks` blocks of this engine; None if they can."""
        expected = self._expected(num_blocks)
        contents = {name: part for name, part in contents.items() if not name.startswith(TAPS) or name in expected}
        expected = {name: what for name, what in expected.items() if not name.startswith(TAPS) or name in contents}
        if odd := sorted(expected.keys() ^ contents.keys()):
            return f"it {'lacks' if odd[0] in expected else 'has'} tensor {odd[0]}"
        for name, (shape, dtype) in expected.items():
            part = contents[name]
            if tuple(part.shape) != shape or part.dtype != dtype:
                return f"{name} is {list(part.shape)} of {part.dtype}, not {list(shape)} of {dtype}"
        return None

    def num_bytes(self, num_blocks: int) -> int:
        """Returns the bytes of `num_blocks` blocks and of the recurrent state after the last block."""
        state = 0 if self._states is None else self._states.kept_bytes
        return num_blocks * self._cache.block_bytes + state

    def _pool_parts(self) -> Iterator[tuple[str, Tensor]]:
        for index, held in self._cache.prefix_layers.items():
            for kind, part in zip(("keys", "values"), held, strict=False):
                if part.numel():
                    # float8 is viewed as bytes, because torch does not index float8 on CPUs.
                    is_fp8 = part.dtype == torch.float8_e4m3fn
                    yield f"layers.{index}.{kind}", part.view(torch.uint8) if is_fp8 else part

    def _expected(self, num_blocks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        num_tokens = num_blocks * self._cache.block_size
        expected = {name: ((num_tokens, *part.shape[2:]), part.dtype) for name, part in self._pool_parts()}
        if self._states is not None:
            rows = self._states.kept_like(num_blocks).items()
            expected |= {f"states.{name}": (tuple(part.shape), part.dtype) for name, part in rows}
        expected[self._taps_name] = ((num_tokens, self._contexts.taps_size), self._contexts.dtype)
        return expected
