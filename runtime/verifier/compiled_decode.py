"""The verifier's decode rounds through torch.compile: four graphs, warmed before the first request."""

import logging
import time

import torch

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.verifier.dummy_batch import dummy_decode_batch
from wingbeat.runtime.verifier.model import ForwardBatch, ModelOutput, VerifierModel

logger = logging.getLogger(__name__)


class CompiledDecode:
    """`VerifierModel.forward` compiled for rounds without prompt chunks.

    One graph each for {one, several} sequences x {bare roots, token trees}; batch and context lengths are dynamic. A
    shape no warm-up met runs eagerly: compiling in the middle of a round would hold every request up for seconds.
    """

    def __init__(self, model: VerifierModel, cache: KVCache, windows: tuple[int, ...], config: EngineConfig) -> None:
        self.model, self.cache, self.windows, self.config = model, cache, windows, config
        self._compiled = torch.compile(model, fullgraph=True, dynamic=True)

    def __call__(self, batch: ForwardBatch) -> ModelOutput:
        """Run one decode round."""
        with torch.compiler.set_stance("eager_on_recompile"):
            return self._compiled(batch)

    @torch.inference_mode()
    def warm_up(self, with_trees: bool) -> None:
        """Compile every graph; takes from seconds (cached on disk) to minutes.

        Args:
            with_trees: False leaves the graphs for token trees out, for engines without a drafter.
        """
        started = time.perf_counter()
        nodes = (1, self.config.speculation.num_nodes) if with_trees else (1,)
        batches = (1, 2, 3) if self.config.max_num_seqs > 2 else range(1, self.config.max_num_seqs + 1)
        widest = self.config.max_blocks_per_seq
        for num_nodes in nodes:
            for num_reqs in batches:
                for width in sorted({max(widest // 2, 1), max(widest // 4, 1)}):
                    if width * self.config.block_size >= num_nodes:
                        self._compiled(dummy_decode_batch(self.cache, self.windows, num_reqs, num_nodes, width, widest))
        logger.info("compiled the decode rounds in %.1f s", time.perf_counter() - started)
