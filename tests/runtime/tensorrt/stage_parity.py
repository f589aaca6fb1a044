"""Equal passes through torch over paged KV and through a session over linear KV."""

from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.tree.reference import ancestor_mask
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.round.rows import ModelOutput, Rows, Segment
from wingbeat.runtime.tensorrt.base_runner import BaseRunner
from wingbeat.runtime.tensorrt.engine_config import BaseEngineConfig
from wingbeat.runtime.tensorrt.engine_model import EngineModel, KvRows
from wingbeat.runtime.tensorrt.linear_kv import LinearKV, Pages, RowCache
from wingbeat.runtime.tensorrt.session import EngineSession
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel

TREE_PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4, 4, 7)
CHAIN_PARENTS = tuple(range(-1, 6))
BARE = (-1,)
CHUNK = 20
"""Rows of a prompt, more than a tree has."""
CONTEXTS = (29, 3, 17, 41)


class Both:
    """A verifier under both backends, with the same keys and values."""

    def __init__(self, loaded: LoadedModel, session: EngineSession, config: BaseEngineConfig) -> None:
        self.loaded, self.config = loaded, config
        self.capacity, self.num_rows = config.limits.capacity, config.limits.max_batch_size + 1
        limits = EngineConfig(
            max_model_len=config.limits.max_kv_cache_capacity, block_size=self.capacity, num_kv_blocks=self.num_rows
        )
        self.paged = KVCache(loaded.layers, limits, loaded.dtype, loaded.device)
        self.linear = LinearKV(loaded.layers, self.num_rows, self.capacity, config.torch_dtype, loaded.device)
        cache = RowCache(self.linear, Pages(self.num_rows, self.capacity), 0)
        self.torch = VerifierModel(loaded, config.tap_layers)
        runner = BaseRunner(session, config, self.linear)
        self.engine = EngineModel(runner, cache, config.tap_layers, (), folder=None)

    def run(self, token_ids: Tensor, contexts: Tensor, parents: tuple[int, ...] | None) -> "Outputs":
        """Rows of some sequences behind their contexts; `parents` None is a chunk of a prompt."""
        num_seqs, num_rows = token_ids.shape
        tables = torch.arange(1, num_seqs + 1)[:, None]
        if parents is None:
            visible, depths = None, torch.arange(num_rows)
        else:
            tree = torch.tensor(parents).expand(num_seqs, -1)
            visible = ancestor_mask(tree)
            depths = visible[0].sum(-1) - 1
        positions = contexts[:, None] + depths
        segment = Segment.of(0, positions, contexts, visible, tables)
        mapping = (tables * self.capacity + contexts[:, None] + torch.arange(num_rows)).flatten()
        owners = KvRows((tables - 1).expand_as(token_ids).flatten())
        flat = token_ids.reshape(1, -1), positions.reshape(1, -1)
        batch = Rows(*flat, mapping, [segment], self.paged.layers, columns={KvRows: owners})
        with torch.inference_mode():
            return Outputs(self.torch(batch), self.engine(batch))

    def prefill(self, prompts: list[Tensor]) -> list["Outputs"]:
        """Uneven prompts into rows 1, 2 and so on, one after another."""
        return [self._prefill_row(row, prompt) for row, prompt in enumerate(prompts, start=1)]

    def _prefill_row(self, row: int, prompt: Tensor) -> "Outputs":
        tables, start = torch.tensor([[row]]), torch.zeros(1, dtype=torch.int64)
        positions = torch.arange(len(prompt))[None]
        segment = Segment.of(0, positions, start, None, tables)
        mapping = row * self.capacity + positions[0]
        owners = KvRows(torch.full_like(prompt, row - 1))
        batch = Rows(prompt[None], positions, mapping, [segment], self.paged.layers, columns={KvRows: owners})
        with torch.inference_mode():
            return Outputs(self.torch(batch), self.engine(batch))

    def kv_difference(self, contexts: list[int]) -> float:
        """Largest difference between the two caches over what is committed."""
        worst = 0.0
        for paged, linear in zip(self.paged.layers, self.linear.layers, strict=True):
            for ours, theirs in zip(linear, paged, strict=True):
                for row, length in enumerate(contexts, start=1):
                    gap = ours[row, :, :length].transpose(0, 1) - theirs[row, :length]
                    worst = max(worst, gap.abs().max().item())
        return worst


class Outputs(NamedTuple):
    """Outputs of both for a batch."""

    torch: ModelOutput
    engine: ModelOutput

    def difference(self, relative: bool = False) -> float:
        """Largest over logits and taps; `relative` to the largest of the numbers where that is above 1."""
        pairs = [(self.torch.logits, self.engine.logits)]
        if self.torch.taps is not None:
            pairs.append((self.torch.taps, self.engine.taps))
        return max(
            (ours - theirs).abs().max().item() / (theirs.abs().max().clamp_min(1).item() if relative else 1.0)
            for theirs, ours in pairs
        )


def largest_differences(both: Both, batch: int, relative: bool = False) -> dict[str, float]:
    """By stage, over uneven contexts; of keys and values too, which are never relative."""
    generator = torch.Generator().manual_seed(5)
    vocab = both.loaded.vocab_size

    def draw(*shape: int) -> Tensor:
        return torch.randint(0, vocab, shape, generator=generator)

    contexts = torch.tensor(CONTEXTS[:batch])
    prompts = [draw(length) for length in contexts.tolist()]
    found = {"prefill": max(out.difference(relative) for out in both.prefill(prompts))}
    found["kv"] = both.kv_difference(contexts.tolist())
    for name, parents in (("tree", TREE_PARENTS), ("chain", CHAIN_PARENTS), ("plain", BARE)):
        found[name] = both.run(draw(batch, len(parents)), contexts, parents).difference(relative)
    found["chunks"] = both.run(draw(batch, CHUNK), contexts, None).difference(relative)
    return found


def kv_after_compaction(both: Both, num_seqs: int) -> tuple[float, float]:
    """Accept a path of a tree, then compare with a fresh prefill of the same tokens: (before moving, after)."""
    generator = torch.Generator().manual_seed(6)
    contexts = torch.tensor(CONTEXTS[:num_seqs])
    prompts = [torch.randint(0, both.loaded.vocab_size, (length,), generator=generator) for length in contexts]
    both.prefill(prompts)
    tree = torch.randint(0, both.loaded.vocab_size, (num_seqs, len(TREE_PARENTS)), generator=generator)
    both.run(tree, contexts, TREE_PARENTS)
    path = torch.tensor([0, 1, 4, 7, 9])
    rows = torch.arange(1, num_seqs + 1)[:, None] * both.capacity + contexts[:, None]
    fresh = Both(both.loaded, both.engine.runner.stages.session, both.config)
    fresh.prefill([torch.cat([prompt, nodes[path]]) for prompt, nodes in zip(prompts, tree, strict=True)])

    def gap() -> float:
        return max(
            (ours[row, :, : length + len(path)] - new[row, :, : length + len(path)]).abs().max().item()
            for pair, new_pair in zip(both.linear.layers, fresh.linear.layers, strict=True)
            for ours, new in zip(pair, new_pair, strict=True)
            for row, length in enumerate(contexts.tolist(), start=1)
        )

    before = gap()
    both.linear.shift(rows + path, rows + torch.arange(len(path)))
    return before, gap()
