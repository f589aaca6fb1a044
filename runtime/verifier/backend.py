"""Interface to the library that runs the verifier's forward pass.

The library is torch here, and a compiled inference engine in other backends.
"""

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel


class Backend:
    """Runs transformers' modeling code with torch over a paged KV cache; subclasses return other models and caches."""

    on_host: bool | None = None
    """Default of the `Engine` argument `on_host`."""

    def parts(
        self, loaded: LoadedModel, config: EngineConfig, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]
    ) -> tuple[VerifierModel, KVCache]:
        """Returns the verifier model, and the KV cache that its forward pass reads and writes.

        Raises:
            ValueError: a layer that the drafter needs does not exist, or the memory does not hold a single sequence.
        """
        model = VerifierModel(loaded, tap_layers, kv_layers)
        return model, KVCache(loaded.layers, config, loaded.dtype, loaded.device, loaded.pool_memory)

    def graph_device(self, device: GraphDevice) -> GraphDevice:
        """Returns the device that captures rounds; subclasses may wrap the given device."""
        return device


TORCH = Backend()
