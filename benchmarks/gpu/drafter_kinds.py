"""Cost of drafters with weights at the 8B shape: chains of seven by levels, in one pass, or by a draft model.

Acceptance is forced to the same tokens per round for all kinds, as in `engine_speed.py`, so that only the time of a
draft differs; draft quality is not compared. Verifier and drafter share one process.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _engine import CHAIN, CHAIN_LENGTH, Case, Speed, facts, new_drafter, speed, too_large
from _harness import Bench, Cases, Figure, Result, run
from _model import eagle_config, layer_sizes, llama_config, random_model, shape_facts
from _stage_times import StageTimes
from engine_speed import engine_of
from round_stages import Repeated
from torch import nn

from wingbeat.runtime.config import ForcedAcceptance
from wingbeat.runtime.draft_model.model_drafter import ModelDrafter
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.graphs.graph_device import CudaGraphDevice, GraphDevice
from wingbeat.runtime.one_pass.config import LayerMask, OnePassConfig, Slots
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.one_pass.one_pass_drafter import OnePassDrafter, ParallelEagleDrafter
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead
from wingbeat.runtime.verifier.loading.loader import LoadedModel

BATCHES = (1, 16, 64)
TAPS, NUM_LAYERS, NUM_PARALLEL_LAYERS = (2, 9, 16, 23, 29), 5, 4
"""Tapped layers and numbers of layers, as in published heads of either kind."""
MODEL_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
"""The shape of Llama-3.2-1B."""


def graph_device(bench: Bench) -> GraphDevice:
    """Graph device for this machine."""
    return CudaGraphDevice(bench.device) if bench.device.type == "cuda" else Repeated()


def drawn(bench: Bench, make: Callable[[], nn.Module]) -> Any:
    """Creates a head with random weights on the device."""
    with torch.device(bench.device):
        head = make()
    for parameter in head.parameters():
        parameter.data.normal_(1 if parameter.dim() == 1 else 0, 0.02)
    return head.to(bench.dtype).eval().requires_grad_(False)


def one_pass(bench: Bench) -> Drafter:
    """DFlash drafter: five layers over a block of eight slots, the first of which holds the last settled token."""
    target = llama_config(bench)
    config = OnePassConfig(
        family=OnePassFamily.DFLASH,
        slots=Slots.FILL_IN,
        block_size=1 + CHAIN.draft_steps,
        masks=(LayerMask(),) * NUM_LAYERS,
        **layer_sizes(target),
        tap_layers=(1, 2, 3) if bench.quick else TAPS,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        mask_token_id=target.vocab_size - 1,
    )
    return OnePassDrafter(drawn(bench, lambda: OnePassHead(config)), CHAIN, graph_device(bench))


def parallel_eagle(bench: Bench) -> Drafter:
    """P-EAGLE drafter: an EAGLE-3 head of four layers whose further tokens are masked slots."""
    config = eagle_config(bench, num_layers=NUM_PARALLEL_LAYERS)
    head = drawn(bench, lambda: ParallelEagleHead(config, config.vocab_size - 1))
    return ParallelEagleDrafter(head, CHAIN, graph_device(bench))


def draft_model(bench: Bench) -> Drafter:
    """Draft model: a Llama of a billion parameters."""
    loaded = random_model(bench, llama_config(bench, **({} if bench.quick else MODEL_1B)))
    return ModelDrafter(loaded, CHAIN, graph_device=graph_device(bench))


KINDS: dict[str, Callable[[Bench], Drafter]] = {
    "EAGLE-3": lambda bench: new_drafter(bench, CHAIN, graph_device=graph_device(bench)),
    "DFlash": one_pass,
    "P-EAGLE": parallel_eagle,
    "draft model of 1B": draft_model,
}


class Kinds:
    """Measures engines with one verifier."""

    def __init__(self, bench: Bench, loaded: LoadedModel) -> None:
        self.bench, self.loaded = bench, loaded
        self.plain: dict[int, Speed] = {}
        """Plain speed by batch size."""
        self.failed: dict[str, list[str]] = {}
        """Failed captures by case."""

    def measure(self, kind: str, case: Case) -> list[Figure]:
        """Measures rounds of one engine, and plain rounds if that batch size has none yet."""
        graphs = None if self.bench.device.type == "cuda" else Repeated()
        drafter = KINDS[kind](self.bench)
        engine = engine_of(self.bench, self.loaded, case, graphs, drafter)
        figures = []
        if case.batch not in self.plain:
            plain = self.plain[case.batch] = speed(self.bench, engine, speculation=False)
            figures = [Figure(f"batch {case.batch}, plain", plain.tokens_per_s, "tokens/s")]
        times = StageTimes(self.bench, engine)
        measured = speed(self.bench, engine, True, times)
        engine.model.remove_taps()
        stats = engine.stats()
        parts = (stats.graphs, drafter.graph_stats)
        self.failed[case.label] = [str(failure) for part in parts if part is not None for failure in part.failed]
        return [
            *figures,
            Figure(f"{case.label}: speed", measured.tokens_per_s, "tokens/s"),
            Figure(f"{case.label}: over plain", measured.tokens_per_s / self.plain[case.batch].tokens_per_s, "x"),
            Figure(f"{case.label}: acceptance length", stats.speculation.acceptance_length, "tokens"),
            Figure(f"{case.label}: round", measured.round_ms, "ms"),
            Figure(f"{case.label}: draft", times.stages_ms["draft"], "ms"),
        ]


def measure(bench: Bench) -> Result:
    """Measures every kind at every batch size; figures are reported as they are measured."""
    config = llama_config(bench)
    loaded = random_model(bench, config)
    kinds = Kinds(bench, loaded)
    told = shape_facts(config, bench.dtype) | facts(bench)
    told["drafts"] = f"chains of {CHAIN.draft_steps}, {CHAIN_LENGTH} tokens a round forced"
    measured = Cases(bench, told, {"forced_acceptance": True, "graphs_failed": kinds.failed, "skipped": {}})

    def one(kind: str, case: Case) -> list[Figure]:
        why_not = too_large(bench, loaded, case)
        if why_not is not None:
            measured.result.details["skipped"][case.label] = why_not
            return []
        return kinds.measure(kind, case)

    for batch in (1, 2) if bench.quick else BATCHES:
        for kind in KINDS:
            case = Case(kind, batch, CHAIN, ForcedAcceptance.length(CHAIN_LENGTH))
            measured.run(case.label, partial(one, kind, case))
    return measured.result


if __name__ == "__main__":
    run(__doc__, measure)
