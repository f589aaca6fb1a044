"""Hooks of the runtime part that updates the weights of served verifiers, and frees their memory for a sleep."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from wingbeat.runtime.config import EngineConfig
    from wingbeat.runtime.rollouts.current_rows import Place
    from wingbeat.runtime.verifier.layers.division import Division
    from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

served_weights = "wingbeat.runtime.rollouts.served_weights:ServedWeights"
follow_rows = "wingbeat.runtime.rollouts.rows_follower:follow_rows"
engine_settings = {"frees_memory": (bool, False)}
"""`frees_memory`: whether weights change while they are served, and the engine's memory can be given back."""


def extend_model(loaded: "LoadedModel", config: "EngineConfig") -> None:
    """Prepares a verifier for new weights, and moves it on a GPU into memory that can be given back, if requested."""
    extend_shard(loaded, None, config)


def extend_shard(loaded: "LoadedModel", ranks: "Division | None", config: "EngineConfig") -> None:
    """Does for a rank's shard of a verifier as `extend_model` does for a whole verifier."""
    if not config.frees_memory:
        return
    from wingbeat.runtime.rollouts.current_rows import CurrentRows

    loaded.add(CurrentRows())
    if loaded.device.type == "cuda":
        from wingbeat.runtime.rollouts.device_memory import move

        move(loaded, ranks)


def change_memory(
    loaded: "LoadedModel", layers: "Sequence[tuple[Tensor, Tensor]]", step: str, change: str, what: int | str
) -> bool:
    """Takes a step of a sleep or wake-up of a rank; see `sleep_memory.SleepMemory`."""
    from wingbeat.runtime.rollouts.sleep_memory import own_memory, take_step

    take_step(own_memory(loaded, layers), step, change, what)
    return True


def rows_of(loaded: "LoadedModel") -> "Place | None":
    """Returns where drafters find a verifier's embedding and output matrix after an update; None if there is none."""
    rows: Any = loaded.parts.get("rows")
    return None if rows is None else rows.place
