"""Expected time of a model's round, by the memory it reads, beside the measured one.

A plain round of one sequence reads every weight once, at the rate of a copy; its KV and the host's part come on top.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.layers.linears import Packable

if TYPE_CHECKING:
    import torch
    from torch import nn

    from wingbeat.runtime.llm import LLM

NUM_TOKENS = 40
"""Written plainly, of which the first ones pay for what is made once."""
FIRST_TOKENS = 8
LEAST_BYTES, MOST_BYTES = 1 << 20, 1 << 30
"""Bounds of a copy's size, which is that of the weights: small ones stay in a processor's caches."""
COPIES = 7


class CopyRate(NamedTuple):
    """Rate of copies within one device's memory."""

    device: str
    bytes_per_s: float
    """Bytes read and written counted."""


class RoundEstimate(NamedTuple):
    """Plain rounds of one sequence."""

    num_bytes: int
    """Read in each of them."""
    rates: tuple[CopyRate, ...]
    """The device that the model runs on comes first, then other cards."""
    measured_s: float

    def expected_s(self, rate: CopyRate) -> float:
        """Seconds of a round that does nothing but read."""
        return self.num_bytes / rate.bytes_per_s

    def sentence(self) -> str:
        """For people."""
        first, *others = self.rates
        expected_s = self.expected_s(first)
        said = (
            f"a plain round reads {self.num_bytes / 1e6:,.0f} MB: {1e3 * expected_s:.3g} ms at {first.device}'s copy "
            f"rate of {first.bytes_per_s / 1e9:,.0f} GB/s, measured {1e3 * self.measured_s:.3g} ms "
            f"({self.measured_s / expected_s:.2f} of it)"
        )
        more = (
            f"{rate.device} {1e3 * self.expected_s(rate):.3g} ms at {rate.bytes_per_s / 1e9:,.0f} GB/s"
            for rate in others
        )
        return "; ".join((said, *more))


def round_estimate(llm: "LLM") -> RoundEstimate:
    """Measure copies on the model's device and other cards, and rounds of the model, which has to be idle."""
    import torch

    loaded = llm.engine.loaded
    num_bytes, device = bytes_of_a_round(loaded.model), loaded.device
    devices = [device]
    if device.type == "cuda":
        first = device.index or 0
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count()) if index != first]
    rates = tuple(CopyRate(str(one), copy_rate(one, num_bytes)) for one in devices)
    return RoundEstimate(num_bytes, rates, plain_round_s(llm))


def bytes_of_a_round(model: "nn.Module") -> int:
    """Bytes of the weights that one token's pass reads.

    An input embedding counts as one row, unless it is the output matrix as well, and of a layer's experts as many as a
    token is sent to.
    """
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is None or _weights_of(inputs).keys() == _weights_of(outputs).keys()
    seen = set() if tied else set(_weights_of(inputs))
    share, total = _share_of_experts(model.config.get_text_config()), 0.0
    for name, module in model.named_modules():
        for place, size in _weights_of(module).items():
            total += 0 if place in seen else size * (share if ".experts" in name else 1.0)
            seen.add(place)
    return round(total)


def _weights_of(module: "nn.Module") -> dict[int, int]:
    """Bytes of a module's own weights, packed or not, by where they lie."""
    packed = module.packed if isinstance(module, Packable) else None
    if packed is not None:
        return {id(packed): packed.nbytes()}
    return {one.data_ptr(): one.nbytes for one in module.parameters(recurse=False)}


def _share_of_experts(config: object) -> float:
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count = next((number for number in counts if number), None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return 1.0 if count is None or chosen is None else chosen / count


def copy_rate(device: "torch.device", num_bytes: int) -> float:
    """Bytes per second of a copy within a device's memory, read and written ones counted: the median of some."""
    import torch

    size = min(max(num_bytes, LEAST_BYTES), MOST_BYTES)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return 2 * size / statistics.median(_timed(copy) for _ in range(COPIES))


def _timed(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def plain_round_s(llm: "LLM") -> float:
    """Seconds of a plain round of one sequence: the median time between two tokens."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, speculation=False)
    times = []
    for _, output in llm.stream([[llm.engine.loaded.vocab_size // 2]], [params]):
        times += [time.perf_counter()] * len(output.token_ids)
    return statistics.median(later - sooner for sooner, later in pairwise(times[FIRST_TOKENS:]))
