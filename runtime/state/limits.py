"""What an engine does differently for a model whose layers keep recurrent states, and how many it keeps."""

from dataclasses import replace

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.kv.saved_states import SavedStates
from wingbeat.runtime.refusals import Feature, refuse
from wingbeat.runtime.state.pool import LayerState, row_bytes

SHARE_OF_SAVED = 0.25
"""Of the memory for keys, values and states that is not of running sequences, what saved states may take."""


def with_states(states: list[LayerState], config: EngineConfig, name: str) -> EngineConfig:
    """The same limits for a model with states: the interval is whole blocks.

    Args:
        states: of the model's layers; empty for one without.
        name: of the model.

    Raises:
        ValueError: the configuration asks for what such a model cannot have; names the field.
    """
    if not states:
        return config
    refuse(config.asked() | {Feature.STATES: f"{name} has layers with recurrent state"})
    interval = -(-config.state_interval // config.block_size) * config.block_size
    return replace(config, state_interval=interval)


def manage_blocks(states: list[LayerState], config: EngineConfig, num_blocks: int) -> BlockManager:
    """The bookkeeping of blocks, and of saved states where a model has such.

    Args:
        config: of `with_states`.
    """
    saved, caching = None, config.enable_prefix_caching
    if states:
        num_rows = config.num_saved_states or _most(config, num_blocks)
        saved = SavedStates(num_rows, config.state_interval, config.block_size, caching)
    return BlockManager(num_blocks, config.block_size, caching, saved)


def state_bytes(states: list[LayerState]) -> int:
    """Of a running sequence's recurrent states; 0 for a model without."""
    return row_bytes(states) if states else 0


def state_budget(states: list[LayerState], config: EngineConfig, budget: int) -> tuple[int, EngineConfig]:
    """Bytes that are left for keys and values beside states, and the limits with `num_saved_states` settled.

    Args:
        budget: bytes for both; counts where `num_kv_blocks` is not given.
    """
    if not states:
        return budget, config
    size = row_bytes(states)
    left = budget - (config.max_num_seqs + 1) * size  # rows that pad a round have one, too
    saved = config.num_saved_states
    if saved is None and config.num_kv_blocks is None:
        saved = max(1, min(int(SHARE_OF_SAVED * left) // size, _most(config, None)))
    elif saved is None:
        saved = _most(config, config.num_kv_blocks)
    return left - saved * size, replace(config, num_saved_states=saved)


def _most(config: EngineConfig, num_blocks: int | None) -> int:
    """States worth having: one for every interval of the blocks, or of four times what all slots hold."""
    if not config.enable_prefix_caching:
        return 1  # for a drafter's replay
    per_seq = -(-config.max_model_len // config.state_interval)
    most = 1 + 4 * config.max_num_seqs * per_seq
    held = most if num_blocks is None else num_blocks * config.block_size // config.state_interval
    return max(1, min(most, held))
