"""Cost of the channel over CUDA IPC, computed from the costs of its steps instead of measured.

Covers an empty round trip, and the gap that a drafter in another process leaves in each round on the verifier's device.
Every cost is an assumption unless its source states otherwise; `hop.py` and `two_processes.py` measure the sums.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Cost(NamedTuple):
    """Cost of one step."""

    us: float
    source: str


COSTS = {
    "launch": Cost(5.0, "assumed: a small kernel by a torch operation from Python"),
    "graph launch": Cost(8.0, "assumed: `CUDAGraph.replay`, until its first kernel runs"),
    "event record": Cost(1.5, "assumed"),
    "stream wait": Cost(1.5, "assumed"),
    "word": Cost(3.0, "assumed: a stream that waits for a number in host memory sees it"),
    "event query": Cost(1.0, "assumed, through torch"),
    "device wait": Cost(5.0, "assumed: `synchronize` returns"),
    "doorbell": Cost(14.5, "measured without a GPU: half of the 29 us of an empty hop, Python of both ends included"),
    "nap": Cost(85.0, "measured without a GPU: `time.sleep(20e-6)` takes 70 to 95 us, as Linux rounds timers by 50"),
    "function": Cost(0.1, "assumed: a function of Python entered"),
    "operation": Cost(1.5, "assumed: a torch operation, most of them views"),
    "mark, MPS": Cost(3.0, "assumed: from an event's record to the other stream's first kernel, under MPS"),
    "mark, two GPUs": Cost(5.0, "assumed: the same, across NVLink or PCIe"),
    "mark, time slices": Cost(100.0, "assumed: the same where two processes take turns on a GPU, a switch of contexts"),
}
PLACES = {
    "one GPU, MPS": "mark, MPS",
    "one GPU, no MPS": "mark, time slices",
    "two GPUs": "mark, two GPUs",
}
GAP_COUNTS = {1: (27, 1), 64: (342, 1)}
"""(functions, operations) between a reply and its verification, by sequences: `tests/runtime/host_counts.py`."""


class Step(NamedTuple):
    """Step of an exchange."""

    what: str
    cost: str
    count: float = 1


EMPTY = (
    Step("the verifier fills an outcome", "launch"),
    Step("and marks it", "event record"),
    Step("rings; the drafter's host hears it", "doorbell"),
    Step("its stream waits for the mark", "stream wait"),
    Step("it fills a reply", "launch"),
    Step("and marks it", "event record"),
    Step("rings; the verifier's host hears it", "doorbell"),
    Step("and asks for the mark", "event query"),
    Step("a kernel reads the reply", "launch"),
    Step("and is waited for", "device wait"),
)
"""Steps of a round trip as measured by `hop.py`, without the two marks, whose costs differ by place."""


def gap(num_seqs: int) -> tuple[Step, ...]:
    """Steps that a served round adds to drafting if the verifier's host waits for the reply.

    The drafter's pass is enqueued while the verifier still verifies. If the verifier's stream waits, all other steps
    are done by then.
    """
    functions, operations = GAP_COUNTS[num_seqs]
    return (
        Step("the verifier's host sees the reply's mark, half a nap late", "nap", 0.5),
        Step("asking for it", "event query"),
        Step("its functions until the verification is launched", "function", functions),
        Step("torch operations among them", "operation", operations),
        Step("the verification's graph", "graph launch"),
    )


def total_us(steps: tuple[Step, ...], place: str, num_marks: int) -> float:
    """Total of an exchange with `num_marks` marks from device to device, in microseconds."""
    return sum(COSTS[step.cost].us * step.count for step in steps) + num_marks * COSTS[PLACES[place]].us


def rows() -> Iterator[tuple[str, list[float]]]:
    """Yields rows of microseconds by place."""
    yield "empty round trip", [total_us(EMPTY, place, 2) for place in PLACES]
    yield "hop: half of it", [total_us(EMPTY, place, 2) / 2 for place in PLACES]
    for num_seqs in GAP_COUNTS:
        name = f"gap of a round, {num_seqs} sequence{'s' * (num_seqs > 1)}, host waits"
        yield name, [total_us(gap(num_seqs), place, 1) for place in PLACES]
    yield "gap of a round, stream waits", [total_us((Step("", "word"),), place, 1) for place in PLACES]


def main() -> None:
    """Print the tables of `benchmarks/results/gpu_hop_computed.md`."""
    print(f"| computed, us | {' | '.join(PLACES)} |\n| --- |{' ---: |' * len(PLACES)}")
    for name, sums in rows():
        print(f"| {name} | {' | '.join(f'{us:.0f}' for us in sums)} |")
    print("\n| step | us | source |\n| --- | ---: | --- |")
    for name, cost in COSTS.items():
        print(f"| {name} | {cost.us:g} | {cost.source} |")


if __name__ == "__main__":
    main()
