"""Host time per round: scheduling, bookkeeping of the launch and the update, with a device that takes no time.

Model runner and drafter are replaced by stubs that answer immediately: rounds of trees with three accepted tokens per
sequence. Everything else is the engine's own code, in the fixed shapes of an accelerator. Its few tensor operations run
on the CPU here; on an accelerator enqueuing them costs about the same.
"""

import argparse
import gc
from dataclasses import asdict
from pathlib import Path

import torch
from report import RESULTS, Report, Table, machine_facts, middle, spread
from transformers import AutoModelForCausalLM, LlamaConfig

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.device_clock import DeviceClock
from wingbeat.runtime.drafters.base import DrafterNeeds
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.protocol.messages import (
    AcceptedPaths,
    ChannelSpec,
    Outcome,
    TreeReply,
    outcome_layout,
    reply_layout,
)
from wingbeat.runtime.round.flight import FirstTokens, RoundInFlight, launched_round
from wingbeat.runtime.round.slots import DecodeRows
from wingbeat.runtime.round.tree_check import TreeInbox
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.verifier.loading.loader import prepare_model

BATCHES = (1, 16, 64)
NUM_ACCEPTED = 3
"""Tokens per sequence and round, including the bonus token."""
VOCAB_SIZE = 32
TOKEN_ID = 7
PHASES = {
    "schedule_s": "schedule, slots and blocks",
    "draft_wait_s": "check the trees",
    "accept_s": "note the launch",
    "publish_s": "publish",
    "wait_s": "read the tokens",
    "update_s": "update",
}


class InstantRunner:
    """Stub of the model runner: accepts the same tokens for every sequence, immediately."""

    def __init__(self, max_path: int, taps_size: int) -> None:
        self.max_path, self.taps_size = max_path, taps_size
        self.graphs, self.device_clock = None, DeviceClock("cpu")
        self._made: dict[tuple[int, int], tuple[AcceptedPaths, torch.Tensor]] = {}

    def prepare_trees(self) -> None:
        """Does nothing: there is nothing to capture."""

    def check(self, plan: SchedulerOutput, rows: DecodeRows, drafted: TreeInbox | None) -> TreeInbox | None:
        """Accepts all trees unchecked."""
        return drafted

    def launch(
        self, plan: SchedulerOutput, rows: DecodeRows, trees: TreeInbox | None, num_nodes: int | None = None
    ) -> RoundInFlight:
        """Returns a round that has already finished."""
        num_sampled = sum(chunk.samples for chunk in plan.chunks)
        key = (len(plan.decodes), num_sampled)
        if key not in self._made:
            self._made[key] = self._make(*key)
        paths, sampled = self._made[key]
        first = FirstTokens(sampled, torch.zeros(sum(chunk.length for chunk in plan.chunks), self.taps_size))
        return launched_round(plan, paths._replace(slots=rows.slots), first, 0.0)

    def _make(self, num_reqs: int, num_sampled: int) -> tuple[AcceptedPaths, torch.Tensor]:
        token_ids = torch.full((num_reqs, self.max_path), TOKEN_ID)
        paths = AcceptedPaths(
            slots=torch.zeros(num_reqs, dtype=torch.int64),
            positions=torch.ones(num_reqs, dtype=torch.int64),
            token_ids=token_ids,
            num_tokens=torch.full((num_reqs,), NUM_ACCEPTED),
            num_valid=torch.full((num_reqs,), 2),
            nodes=torch.zeros_like(token_ids),
            taps=torch.zeros(num_reqs, self.max_path, self.taps_size),
        )
        return paths, torch.full((num_sampled,), TOKEN_ID)


class InstantDrafter:
    """Stub of a verifier's end of a channel (`protocol.ends.VerifierEnd`): trees are ready immediately."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.spec = spec
        self.incarnation = 1
        self.token_ids = torch.zeros(spec.num_slots, spec.max_model_len + 1, dtype=torch.int64)
        self._outcome = Outcome(**_zeros(outcome_layout(spec)))
        self._reply = TreeReply(**_zeros(reply_layout(spec)))
        self._round = 0

    def peer_alive(self) -> bool:
        """Returns True always."""
        return True

    def acquire_outcome(self, timeout_s: float) -> Outcome:
        """Returns the same buffers every round."""
        return self._outcome

    def publish_outcome(self) -> int:
        """Returns the next round number."""
        self._round += 1
        return self._round

    def wait_reply(self, round_number: int, timeout_s: float) -> TreeReply:
        """Returns the reply without waiting."""
        return self._reply

    def close(self) -> None:
        """Does nothing: no resources are held."""


def _zeros(layout: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}


def new_engine(batch: int, overlap: bool, max_model_len: int) -> Engine:
    """Creates an engine with a tiny model, whose device and drafter take no time."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, num_hidden_layers=2, max_position_embeddings=max_model_len, eos_token_id=None, **shape
    )
    loaded = prepare_model(AutoModelForCausalLM.from_config(config).eval(), "nothing")
    limits = EngineConfig(max_num_seqs=batch, max_model_len=max_model_len, overlap=overlap)
    limits = EngineConfig(
        **(
            vars(limits)
            | {"num_kv_blocks": batch * limits.max_blocks_per_seq + 1, "max_num_batched_tokens": 64 * batch}
        )
    )
    engine = Engine(loaded, limits, DrafterNeeds((1,), keeps_context=True), on_host=False)
    engine.runner = InstantRunner(limits.speculation.max_path, engine.model.taps_size)
    engine.attach_drafter(InstantDrafter(engine.channel_spec))
    return engine


def measure(batch: int, overlap: bool, num_rounds: int) -> dict[str, list[float]]:
    """Milliseconds by phase and round; the last key holds their sum."""
    prompt_len = 32
    max_model_len = prompt_len + NUM_ACCEPTED * (num_rounds + 40)
    engine = new_engine(batch, overlap, max_model_len)
    params = SamplingParams(max_tokens=max_model_len, temperature=0.0, ignore_eos=True)
    for number in range(batch):
        prompt = tuple((number + index) % VOCAB_SIZE for index in range(prompt_len))
        engine.add_request(Request(str(number), prompt, params))
    for _ in range(10):
        engine.step()
    times: dict[str, list[float]] = {name: [] for name in (*PHASES, "round")}
    gc.disable()
    for _ in range(num_rounds):
        before = asdict(engine.stats().phases)
        outputs = engine.step()
        if len(outputs) != batch:
            raise RuntimeError(f"a round gave {len(outputs)} outputs: {batch} sequences decode")
        after = asdict(engine.stats().phases)
        spent = {name: 1e3 * (after[name] - before[name]) for name in PHASES}
        for name, ms in (spent | {"round": sum(spent.values())}).items():
            times[name].append(ms)
    gc.enable()
    return times


def run(num_rounds: int, output: Path | None) -> None:
    """Measures both loops (with and without overlap) at every batch size, prints and writes the figures."""
    facts = machine_facts() | {
        "model": "none: a runner and a drafter that answer at once",
        "workload": f"{NUM_ACCEPTED} tokens per sequence and round, trees of 16 nodes, {num_rounds} rounds each",
        "torch threads": str(torch.get_num_threads()),
    }
    measured = {(batch, overlap): measure(batch, overlap, num_rounds) for batch in BATCHES for overlap in (False, True)}
    columns = tuple(f"batch {batch}{', overlapped' if overlap else ''}" for batch, overlap in measured)
    labels = PHASES | {"round": "a round"}
    rows = [
        (
            label,
            *(
                spread(times[name], 3) if name == "round" else f"{middle(times[name]):.3f}"
                for times in measured.values()
            ),
        )
        for name, label in labels.items()
    ]
    note = "Medians over rounds; of whole rounds also the range. The device and the drafter take no time."
    figures = [
        {"batch": batch, "overlap": overlap, "ms": {name: middle(values) for name, values in times.items()}}
        for (batch, overlap), times in measured.items()
    ]
    report = Report(
        "Host time per round", facts, [Table("Host time per round", ("ms", *columns), rows, note)], {"runs": figures}
    )
    report.show()
    if output is not None:
        report.save(output)


def main() -> None:
    """Parses options and runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument(
        "--quick", action="store_true", help="a few rounds: checks that the script works, measures nothing"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    output = args.output or (None if args.quick else RESULTS / "host_overhead.json")
    run(20 if args.quick else args.rounds, output)


if __name__ == "__main__":
    main()
