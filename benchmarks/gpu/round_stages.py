"""Round time by stage at the 8B shape, with the floor of each stage: plain, chains, trees at batch 1, 16, 64.

Acceptance is forced, as in `engine_speed.py`, which provides the engine. Stages are timed between CUDA events, on a CPU
by the host's clock. Verifier and drafter share one process, so there is no hop; `hop.py` measures its cost.
"""

from functools import partial
from typing import Any

import torch
from _engine import CHAIN, CHAIN_LENGTH, Case, Speed, facts, speed, too_large, workload
from _floors import Rates, Work, acceptance, drafting, publishing, verification
from _harness import Bench, Cases, Figure, Result, run
from _model import llama_config, random_head, random_model, shape_facts
from _stage_times import StageTimes
from engine_speed import FLAT_RATE, engine_of

from wingbeat.runtime.config import ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.verifier.loading.loader import LoadedModel

BATCHES = (1, 16, 64)
TREE = SpeculationConfig.default("cuda", adaptive=False)
"""Tree that a GPU drafts by default."""
CHAINS, TREES, PLAIN = "chain", "tree", "plain"


class Repeated:
    """Replaces CUDA graphs on the CPU by calling the functions again, so that a quick run takes the same path."""

    def new_pool(self) -> None:
        """See `GraphDevice.new_pool`; there is none."""

    def warm_up(self, function):
        """See `GraphDevice.warm_up`."""
        return function()

    def capture(self, function, pool):
        """See `GraphDevice.capture`."""
        outputs = function()
        return (function, outputs), outputs

    def replay(self, graph) -> None:
        """See `GraphDevice.replay`."""
        function, outputs = graph
        for kept, new in zip(outputs, function(), strict=True):
            if kept is not None:
                kept.copy_(new)

    def synchronize(self) -> None:
        """See `GraphDevice.synchronize`; the host has already done all work."""

    def memory_bytes(self) -> int:
        """See `GraphDevice.memory_bytes`."""
        return 0


class Rounds:
    """Measures engines with one pair.

    Args:
        rates: measured rates of this card.
    """

    def __init__(self, bench: Bench, loaded: LoadedModel, rates: Rates) -> None:
        self.bench, self.loaded, self.rates = bench, loaded, rates
        self.config, self.head = llama_config(bench), random_head(bench._replace(device=torch.device("meta")))
        self.plain: dict[int, Speed] = {}
        """Plain speed by batch size."""

    def measure(self, name: str, case: Case) -> tuple[list[Figure], list[dict[str, Any]]]:
        """Measures an engine's rounds, and plain rounds if that batch size has none yet.

        Returns figures, and rows for programs.
        """
        engine = engine_of(self.bench, self.loaded, case, None if self.bench.device.type == "cuda" else Repeated())
        figures, rows = [], []
        for kind in (name,) if case.batch in self.plain else (PLAIN, name):
            times = StageTimes(self.bench, engine)
            measured = speed(self.bench, engine, kind != PLAIN, times)
            if kind == PLAIN:
                self.plain[case.batch] = measured
            rows.append(self._row(kind, case, measured, times))
            figures += _figures(rows[-1])
        stats = engine.stats()
        engine.model.remove_taps()
        failed = [] if stats.graphs is None else [str(failure) for failure in stats.graphs.failed]
        rows[-1] |= {
            "over_plain": measured.tokens_per_s / self.plain[case.batch].tokens_per_s,
            "acceptance_length": stats.speculation.acceptance_length,
            "graphs_failed": failed,
        }
        label = f"batch {case.batch}, {name}"
        figures.append(Figure(f"{label}: over plain", rows[-1]["over_plain"], "x"))
        figures.append(Figure(f"{label}: acceptance length", rows[-1]["acceptance_length"], "tokens"))
        return figures, rows

    def _row(self, kind: str, case: Case, measured: Speed, times: StageTimes) -> dict[str, Any]:
        per_round = measured.tokens_per_s * measured.round_ms / 1e3 / case.batch
        prompt, num_rounds = workload(self.bench)
        # Context length in the middle of the measured rounds, after the warm-up rounds.
        context = prompt + per_round * (num_rounds // 4 + num_rounds / 2)
        floors = {stage: work.floor_ms(self.rates) for stage, work in self._works(kind, case, context).items()}
        stages = {stage: ms for stage, ms in times.stages_ms.items() if stage in floors}
        stages["rest"], floors["rest"] = measured.round_ms - sum(stages.values()), 0.0
        return {
            "batch": case.batch,
            "kind": kind,
            "tokens_per_s": measured.tokens_per_s,
            "round_ms": measured.round_ms,
            "stages_ms": stages,
            "floors_ms": floors,
            "host_ms": times.host_ms,
        }

    def _works(self, kind: str, case: Case, context: float) -> dict[str, Work]:
        config, itemsize, batch, shape = self.config, self.bench.dtype.itemsize, case.batch, case.speculation
        num_nodes = 1 if kind == PLAIN else shape.num_nodes
        works = {
            "verify": verification(config, itemsize, batch, num_nodes, context),
            "accept": acceptance(config, itemsize, batch, num_nodes),
        }
        if kind != PLAIN:
            works["draft"] = drafting(self.head, itemsize, shape, batch, context)
            works["publish"] = publishing(self.head, itemsize, batch, shape.max_path)
        return works


def _figures(row: dict[str, Any]) -> list[Figure]:
    label = f"batch {row['batch']}, {row['kind']}"
    figures = [
        Figure(f"{label}: speed", row["tokens_per_s"], "tokens/s"),
        Figure(f"{label}: round", row["round_ms"], "ms"),
        Figure(f"{label}: floor of a round", sum(row["floors_ms"].values()), "ms"),
    ]
    return figures + [Figure(f"{label}: {stage}", max(ms, 0.0), "ms") for stage, ms in row["stages_ms"].items()]


def cases(bench: Bench) -> list[tuple[str, Case]]:
    """Chains and trees by batch size, smallest first."""
    shapes = (
        (CHAINS, CHAIN, ForcedAcceptance.length(CHAIN_LENGTH), f"length forced to {CHAIN_LENGTH}"),
        (TREES, TREE, ForcedAcceptance.flat(FLAT_RATE), f"forced {FLAT_RATE} a level"),
    )
    batches = (1, 2) if bench.quick else BATCHES
    return [
        (kind, Case(f"{kind} of {shape.num_nodes}, {what}", batch, shape, forced))
        for batch in batches
        for kind, shape, forced, what in shapes
    ]


def measure(bench: Bench) -> Result:
    """Measures every batch size and shape; figures are reported as they are measured."""
    config = llama_config(bench)
    # Measured first, because the copied buffers take as much memory as half a model.
    rates = Rates(bench.copy_bytes_per_s(), bench.matmul_flops_per_s())
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    loaded = random_model(bench, config)
    told = shape_facts(config, bench.dtype) | facts(bench)
    told["shapes"] = "; ".join(dict.fromkeys(case.name for _, case in cases(bench)))
    measured = Cases(bench, told, {"forced_acceptance": True, "rows": [], "skipped": {}})
    rounds = Rounds(bench, loaded, rates)
    measured.run(
        "rates",
        lambda: [
            Figure("copy bandwidth", rates.bytes_per_s / 1e9, "GB/s"),
            Figure("rate of a product", rates.flops_per_s / 1e12, "TFLOP/s"),
        ],
    )

    def one(kind: str, case: Case) -> list[Figure]:
        why_not = too_large(bench, loaded, case)
        if why_not is not None:
            measured.result.details["skipped"][f"batch {case.batch}, {kind}"] = why_not
            return []
        figures, rows = rounds.measure(kind, case)
        measured.result.details["rows"] += rows
        return figures

    for kind, case in cases(bench):
        measured.run(f"batch {case.batch}, {kind}", partial(one, kind, case))
    return measured.result


if __name__ == "__main__":
    run(__doc__, measure)
