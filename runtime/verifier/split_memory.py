"""Memory of attention's splits on a GPU, where contexts are as long as they may be."""

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def splits_bytes(loaded: LoadedModel, config: EngineConfig, rows: tuple[int, int]) -> int:
    """Of one launch, by the layer that takes most; 0 on the CPU.

    Args:
        rows: requests of the launch, and rows of each.
    """
    if loaded.device.type != "cuda":
        return 0
    from wingbeat.kernels.attention.device import device_limits
    from wingbeat.kernels.attention.triton import partial_bytes

    limits = device_limits(loaded.device.index or 0)
    longest = min(config.max_model_len, loaded.max_position_embeddings)
    return max(
        (
            partial_bytes(
                loaded.dtype,
                rows,
                (layer.num_heads, layer.num_kv_heads),
                (layer.key_dim, layer.value_dim),
                min(longest, 2 * layer.sliding_window) if layer.sliding_window else longest,
                limits,
            )
            for layer in {layer for layer in loaded.layers if layer.num_heads}
        ),
        default=0,
    )
