"""The verifier's decode rounds through torch.compile, where the setting asks for it; prompt chunks run as they are.

On the CPU the whole forward pass is compiled, for lengths that change (`CompiledDecode`). On CUDA a captured graph
keeps compiled kernels, so decoder layers are compiled while graphs are captured, kept where they measure faster
(`faster_layers`).
"""

import logging
import statistics
import time
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from transformers import AttentionInterface

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.verifier.dummy_batch import dummy_decode_batch
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME, wingbeat_attention
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import ForwardBatch, ModelOutput, VerifierModel

logger = logging.getLogger(__name__)

_OPAQUE_ATTENTION = "wingbeat_opaque"
# Attention knows its layer's index: traced into, it would make every layer a compilation of its own.
AttentionInterface.register(_OPAQUE_ATTENTION, torch.compiler.disable(wingbeat_attention))

_MOST_SHAPES = 1024
"""Compilations per class that torch may keep: at least the number of captured buckets."""


class CompiledDecode:
    """`VerifierModel.forward` compiled for rounds without prompt chunks.

    One graph each for {one, several} sequences x {bare roots, token trees}; batch and context lengths are dynamic. A
    shape no warm-up met runs eagerly: compiling in the middle of a round would hold every request up for seconds.

    Args:
        backend: of torch.compile.
    """

    def __init__(
        self,
        model: VerifierModel,
        cache: KVCache,
        windows: tuple[int, ...],
        config: EngineConfig,
        backend: str | Callable = "inductor",
    ) -> None:
        self.model, self.cache, self.windows, self.config = model, cache, windows, config
        self._compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)

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


class CompiledLayers(AbstractContextManager):
    """While entered, a model's decoder layers run compiled, once per class and shape; attention stays as it is.

    Compilations outlive the process in torch's own cache (TORCHINDUCTOR_CACHE_DIR).

    Args:
        backend: of torch.compile; its default mode, which captures nothing itself.
    """

    def __init__(self, loaded: LoadedModel, backend: str | Callable = "inductor") -> None:
        self.loaded = loaded
        classes = {type(layer) for layer in loaded.decoder_layers}
        self._forwards = {
            cls: torch.compile(cls.forward, dynamic=False, backend=backend)
            for cls in sorted(classes, key=lambda cls: cls.__qualname__)
        }
        # Takes seconds to import, for those who compile alone.
        from torch._dynamo import config

        self._limits = config.patch(recompile_limit=_MOST_SHAPES, accumulated_recompile_limit=_MOST_SHAPES)

    def __enter__(self) -> "CompiledLayers":
        self._limits.__enter__()
        self.loaded.model.set_attn_implementation(_OPAQUE_ATTENTION)
        for layer in self.loaded.decoder_layers:
            layer.forward = types.MethodType(self._forwards[type(layer)], layer)
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self.loaded.decoder_layers:
            del layer.forward
        self.loaded.model.set_attn_implementation(ATTENTION_NAME)
        self._limits.__exit__(*error)


class LayerTimes(NamedTuple):
    """Milliseconds of each step, eager and compiled, both captured."""

    eager_ms: list[float]
    compiled_ms: list[float]

    @property
    def compiled_is_faster(self) -> bool:
        """Over all steps together."""
        return sum(self.compiled_ms) < sum(self.eager_ms)


def faster_layers(
    loaded: LoadedModel, steps: Sequence[Callable[[], object]], measure: Callable[[Callable[[], object]], float]
) -> AbstractContextManager:
    """The context to capture graphs in: `CompiledLayers` where they measure faster than eager ones, else an empty one.

    Never compiled on the CPU, where no graph keeps the kernels. A compiler that fails costs a warning.

    Args:
        steps: forward passes of typical buckets.
        measure: milliseconds of one step; `replay_ms` on CUDA.
    """
    return nullcontext() if loaded.device.type == "cpu" else _faster(CompiledLayers(loaded), steps, measure)


def _faster(
    compiled: CompiledLayers, steps: Sequence[Callable[[], object]], measure: Callable[[Callable[[], object]], float]
) -> AbstractContextManager:
    eager_ms, started = [measure(step) for step in steps], time.perf_counter()
    try:
        with compiled:
            times = LayerTimes(eager_ms, [measure(step) for step in steps])
    except Exception as error:
        logger.warning("decoder layers run eagerly, torch.compile failed: %s: %s", type(error).__name__, error)
        return nullcontext()
    logger.info(
        "decoder layers run %s: eager %s ms, compiled %s ms; compiling took %.1f s",
        "compiled" if times.compiled_is_faster else "eagerly",
        *("/".join(f"{ms:.3f}" for ms in part) for part in times),
        time.perf_counter() - started,
    )
    return compiled if times.compiled_is_faster else nullcontext()


def replay_ms(step: Callable[[], object], graphs: GraphDevice, repeats: int = 20) -> float:
    """Median milliseconds of a step replayed as a CUDA graph.

    Args:
        graphs: one for all steps: each has a stream, and each stream a workspace that is never freed.
    """
    graphs.warm_up(step)
    graph, _ = graphs.capture(step, graphs.new_pool())
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs.replay(graph)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
