"""The verifier's decoder layers through torch.compile, where the setting asks for it: captured graphs keep the kernels.

Layers are compiled while graphs are captured, and kept where they measure faster (`faster_layers`).
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

from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME, wingbeat_attention
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

_OPAQUE_ATTENTION = "wingbeat_opaque"
# Attention knows its layer's index: traced into, it would make every layer a compilation of its own.
AttentionInterface.register(_OPAQUE_ATTENTION, torch.compiler.disable(wingbeat_attention))

_MOST_SHAPES = 1024
"""Compilations per class that torch may keep: at least the number of captured buckets."""


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
