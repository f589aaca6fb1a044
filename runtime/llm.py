"""Verifier and drafter in one process, for scripts, tests and the command line, without server or Ray."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from wingbeat.runtime.config import INT8, EngineConfig, resolve_dtype
from wingbeat.runtime.drafters.base import Drafter, DrafterNeeds
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_device import GraphDevice
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.inner_drafter import ChannelFactory, InnerDrafter, LocalChannel, attach
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.pair import PairSettings, engine_of_pair, most_threads
from wingbeat.runtime.scheduling.request import FinishReason, Request, RequestOutput, SamplingParams
from wingbeat.runtime.tensor_files import stored_dtype
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


class GenerationResult(NamedTuple):
    """A finished request."""

    token_ids: list[int]
    finish_reason: FinishReason
    metrics: SpeculationMetrics
    num_cached_tokens: int


def build_engine(
    loaded: LoadedModel,
    config: EngineConfig,
    drafter: Drafter | None,
    channel_factory,
    graph_device: GraphDevice | None = None,
    on_host: bool | None = None,
) -> Engine:
    """Builds an engine whose drafter runs in the same thread; channel messages are those of a remote drafter.

    Args:
        channel_factory: `ChannelSpec -> LocalChannel`; not called without a drafter.
        graph_device, on_host: see `Engine`.
    """
    engine = Engine(loaded, config, drafter.needs if drafter else DrafterNeeds(), graph_device, on_host)
    if drafter is not None:
        connect(engine, drafter, channel_factory)
    return engine


def connect(engine: Engine, drafter: Drafter, channel_factory: ChannelFactory) -> LocalChannel:
    """Attaches a drafter of this process to an engine. The engine drops the drafter if the drafter raises."""
    return attach(engine, DraftWorker(drafter), channel_factory)


class LLM:
    """Generates from token ids in this process.

    Args:
        model: folder of a Hugging Face causal LM, a GGUF file, or a name, see `wingbeat.runtime.hub.checkpoint_folder`.
        drafter: a name, a folder or an import path, see `wingbeat.runtime.drafters.choice.parse_drafter`.
        channel_factory: builds the in-process channel, `wingbeat.cluster.channels.channel.InProcessChannel`.
        dtype: "float32", "bfloat16" or "float16"; "int8" on CPUs (`wingbeat.runtime.config.INT8`). None is float32 on
            CPUs; on CUDA it is float16 for a float16 checkpoint and else bfloat16. "auto" means the same as None,
            except on CPUs with bfloat16 units, where bfloat16 is used if its rounds are faster.
        device: "cpu", "cuda", or "auto", which is CUDA if available.
        threads: CPU threads; 0 times several numbers of threads, up to the process's number of cores, and uses the
            smallest number beyond which more threads do not pay.
        allow_bad_drafter: whether a drafter that does not suit the model only causes a warning, instead of an error.
        engine_dir: directory of compiled engines that run instead of the weights.
        fp8_drafter: whether the weights of an EAGLE head are rounded to float8.
        drafter_settings: settings of the drafter's kind by name, see
            `wingbeat.runtime.drafters.drafter_kind.DrafterKind.settings`.

    Raises:
        ValueError, FileNotFoundError: the model, the drafter or a limit cannot be used; the message is one line with
            the reason.
    """

    def __init__(
        self,
        model: str | Path,
        drafter: str | Path,
        engine_config: EngineConfig,
        channel_factory: ChannelFactory,
        *,
        dtype: str | None = None,
        device: str = "auto",
        threads: int = 1,
        allow_bad_drafter: bool = False,
        engine_dir: Path | None = None,
        fp8_drafter: bool = False,
        drafter_settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        torch.set_num_threads(threads or 1)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = checkpoint_folder(model)
        stored = stored_dtype(folder)
        settings = PairSettings(
            model=folder,
            drafter=parse_drafter(drafter, Path(model)),
            engine=engine_config,
            dtype=getattr(torch, resolve_dtype(dtype, device, stored)),
            most_threads=most_threads(threads),
            allow_bad_drafter=allow_bad_drafter,
            engine_dir=engine_dir,
            fp8_drafter=fp8_drafter,
            drafter_settings=drafter_settings,
            eight_bits=dtype == INT8,
            tries_bfloat16=dtype == "auto" and device == "cpu" and stored == "bfloat16",
        )
        inner = InnerDrafter(settings, device)
        pair = engine_of_pair(settings, device, inner.needs)
        self.engine, self.tokenizer, self.convention_choice, check, self.grammars = pair
        if inner.worker is not None:
            attach(self.engine, inner.worker, channel_factory)
        self.self_test = None if check is None else check(self.engine)

    def stream(self, prompts: list[list[int]], params: list[SamplingParams]) -> Iterator[tuple[int, RequestOutput]]:
        """Runs prompts together; yields, after each round, (index of the prompt, output with the prompt's new tokens).

        Raises:
            ValueError: the model cannot run a prompt or its parameters; no prompt is run.
            RuntimeError: a prompt failed; the other prompts are aborted.
        """
        try:
            for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
                grammar = None
                if param.grammar is not None and self.grammars is not None:
                    grammar = self.grammars.compile(param.grammar)
                self.engine.add_request(Request(str(index), tuple(prompt), param), grammar)
            while self.engine.has_unfinished_requests():
                for output in self.engine.step():
                    if output.failure is not None:
                        raise RuntimeError(output.failure)
                    yield int(output.request_id), output
        finally:
            for index in range(len(prompts)):
                self.engine.abort_request(str(index))

    def stop(self, index: int) -> SpeculationMetrics:
        """Ends a prompt of the running `stream` early; returns the prompt's speculation metrics so far."""
        return self.engine.abort_request(str(index)) or SpeculationMetrics()

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[GenerationResult]:
        """Runs prompts together until all have ended; returns results in the order of the prompts."""
        token_ids: list[list[int]] = [[] for _ in prompts]
        last: list[RequestOutput | None] = [None] * len(prompts)
        for index, output in self.stream(prompts, params):
            token_ids[index] += output.token_ids
            if output.finish_reason is not None:
                last[index] = output
        return [
            GenerationResult(ids, end.finish_reason, end.metrics, end.num_cached_tokens)
            for ids, end in zip(token_ids, last, strict=True)
        ]
