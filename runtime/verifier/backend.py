"""What runs the verifier: torch, or engines in its place. Everything else of an engine stays the same."""

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.model import VerifierModel


class Backend:
    """Transformers' modeling code by torch, over paged KV; others give the same two parts of an engine."""

    on_host: bool | None = None
    """As for `Engine`."""

    def parts(
        self, loaded: LoadedModel, config: EngineConfig, tap_layers: tuple[int, ...], kv_layers: tuple[int, ...]
    ) -> tuple[VerifierModel, KVCache]:
        """The forward pass and the keys and values that it reads and writes.

        Raises:
            ValueError: a layer that the drafter needs does not exist, or the memory holds no sequence.
        """
        model = VerifierModel(loaded, tap_layers, kv_layers)
        return model, KVCache(loaded.layers, config, loaded.dtype, loaded.device)

    def graph_device(self, device: GraphDevice) -> GraphDevice:
        """Device that captures rounds, where the given one does not by itself."""
        return device


TORCH = Backend()
