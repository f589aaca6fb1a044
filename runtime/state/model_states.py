"""The `ModelPart` of models with recurrent states; also determines the number of saved states."""

from dataclasses import replace

from torch import nn

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.refusals import refuse
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.state.keeper import StateKeeper
from wingbeat.runtime.state.mixer import Mixer, states_of
from wingbeat.runtime.state.pool import LayerState, row_bytes
from wingbeat.runtime.state.saved_states import SavedStates
from wingbeat.runtime.state.settings import REFUSED, STATES
from wingbeat.runtime.verifier.layers.model_part import ModelPart

SHARE_OF_SAVED = 0.25
"""Maximum share of the memory for KV and saved states that saved states get by default."""


class ModelStates(ModelPart):
    """The mixers of a model's layers.

    Args:
        mixers: the mixers, on their device; a layer may have several.
    """

    name = "states"
    keeps_states = True

    def __init__(self, mixers: tuple[Mixer, ...]) -> None:
        self.mixers = mixers
        self.inner_linears: frozenset[nn.Module] = frozenset().union(*(mixer.inner_linears for mixer in mixers))

    @property
    def states(self) -> list[LayerState]:
        """Shapes of a sequence's states, by layer."""
        return states_of(self.mixers)

    def limits(self, config: EngineConfig, name: str) -> EngineConfig:
        """See `ModelPart.limits`; rounds the interval up to whole blocks."""
        refuse(config.asked() | {STATES: f"{name} has layers with recurrent state"}, REFUSED)
        interval = -(-config.state_interval // config.block_size) * config.block_size
        return replace(config, state_interval=interval)

    def seq_bytes(self) -> int:
        """See `ModelPart.seq_bytes`."""
        return row_bytes(self.states)

    def budget(self, config: EngineConfig, budget: int) -> tuple[int, EngineConfig]:
        """See `ModelPart.budget`; also determines `num_saved_states`.

        Args:
            budget: bytes for KV and states; used if `num_kv_blocks` is not given.
        """
        size = row_bytes(self.states)
        left = budget - (config.max_num_seqs + 1) * size  # the spare row serves padding rows
        saved = config.num_saved_states
        if saved is None and config.num_kv_blocks is None:
            saved = max(1, min(int(SHARE_OF_SAVED * left) // size, most_saved(config, None)))
        elif saved is None:
            saved = most_saved(config, config.num_kv_blocks)
        return left - saved * size, replace(config, num_saved_states=saved)

    def beside(self, config: EngineConfig, num_blocks: int) -> SavedStates:
        """See `ModelPart.beside`; returns the saved states."""
        num_rows = config.num_saved_states or most_saved(config, num_blocks)
        return SavedStates(num_rows, config.state_interval, config.block_size, config.enable_prefix_caching)

    def feature(self, slots: SlotState, config: EngineConfig, blocks: BlockManager, cache: KVCache) -> StateKeeper:
        """See `ModelPart.feature`."""
        return StateKeeper(self.mixers, config, blocks, slots.device)


def most_saved(config: EngineConfig, num_blocks: int | None) -> int:
    """Number of states worth saving: one per `state_interval` tokens of the KV blocks.

    The number is limited to the states of 4 x max_num_seqs sequences of max_model_len tokens."""
    if not config.enable_prefix_caching:
        return 1  # a drafter's replay needs one row
    per_seq = -(-config.max_model_len // config.state_interval)
    most = 1 + 4 * config.max_num_seqs * per_seq
    held = most if num_blocks is None else num_blocks * config.block_size // config.state_interval
    return max(1, min(most, held))
