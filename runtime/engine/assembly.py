"""Builds the parts of an engine, such as scheduler, model runner and drafter client, and connects these parts."""

import torch

from wingbeat.runtime.config import EngineConfig, asks_for_graphs
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.clocks import RoundClock
from wingbeat.runtime.engine.drafter_client import DrafterClient
from wingbeat.runtime.engine.speculation import Speculation
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.kv.pool import kv_dtype
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.round.runner import ModelRunner
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.scheduler import Scheduler
from wingbeat.runtime.verifier.backend import Backend
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel, features_of
from wingbeat.runtime.verifier.layers.rows_alike import rows_alike


def assemble(
    loaded: LoadedModel,
    config: EngineConfig,
    needs: DrafterNeeds,
    backend: Backend,
    graph_device: GraphDevice | None = None,
    on_host: bool | None = None,
) -> tuple[Scheduler, ModelRunner, DrafterClient]:
    """Builds the parts of an engine, which hold its other parts; the arguments are those of `Engine`.

    The limits in the parts' config are adjusted to the model and the device.

    Raises:
        ValueError: the configuration needs something that the model or its device lacks; the message names the field
            and its value.
    """
    loaded.check_length(config.max_model_len)
    config = loaded.limits(config)
    model, cache = backend.parts(loaded, config, needs.tap_layers, needs.kv_layers)
    block_manager = loaded.manage_blocks(config, cache)
    slots = SlotState(config, loaded.vocab_size, loaded.device, loaded.eos_token_ids)
    features = features_of(loaded, slots, config, block_manager, cache)
    scheduler = Scheduler(
        config,
        block_manager,
        eos_token_ids=loaded.eos_token_ids,
        seats=loaded.seats,
        left=lambda slot: [feature.leave(slot) for feature in features],
    )
    graph_device = _graph_device(config, loaded.device, graph_device)
    graph_device = None if graph_device is None else backend.graph_device(graph_device)
    runs_on_host = loaded.device.type == "cpu" and graph_device is None and False not in (on_host, backend.on_host)
    runner = _runner_class(loaded, config, runs_on_host)(
        model=model,
        cache=cache,
        slots=slots,
        config=config,
        last_position=loaded.max_position_embeddings - 1,
        graph_device=graph_device,
        features=features,
    )
    _check_deterministic(loaded, config, runner)
    policy = first_result("speculation", loaded, runner, config) or Speculation(config.speculation.max_path - 1)
    drafting = DrafterClient(
        config=config,
        block_manager=block_manager,
        slots=slots,
        speculation=policy,
        clock=RoundClock(),
        inbox=runner.inbox,
        features=features,
        contexts=first_result("recorded_contexts", block_manager, model.taps_size, loaded.dtype),
        tell_inputs=None if loaded.reader is None else loaded.reader.tell_inputs,
        texts=first_result("text_drafts", config, policy),
    )
    return scheduler, runner, drafting


def _runner_class(loaded: LoadedModel, config: EngineConfig, runs_on_host: bool) -> type[ModelRunner]:
    host_round = first_result("host_round", kv_dtype(config, loaded.dtype)) if runs_on_host else None
    return host_round or ModelRunner


def _check_deterministic(loaded: LoadedModel, config: EngineConfig, runner: ModelRunner) -> None:
    if not config.deterministic:
        return
    rows_alike(loaded.device).check_limits(config)
    if not (loaded.deterministic and runner.rows_can_be_alike):
        raise ValueError(
            "deterministic is True: the verifier was not loaded as deterministic, or its rounds have fixed shapes"
        )


def _graph_device(config: EngineConfig, device: torch.device, given: GraphDevice | None) -> GraphDevice | None:
    """Returns the device that captures decode rounds, or None if rounds run eagerly.

    Raises:
        ValueError: graphs are requested for a verifier on a device that cannot capture.
    """
    on_cuda = device.type == "cuda"
    asked = asks_for_graphs(config.cuda_graphs)
    if asked and given is None and not on_cuda:
        raise ValueError(
            f"cuda_graphs is {config.cuda_graphs}: the verifier is on {device}, which cannot capture graphs"
        )
    wanted = asked or (config.may_capture and (on_cuda or given is not None))
    if not wanted:
        return None
    return CudaGraphDevice(device) if given is None else given
