"""Copy bandwidth of the device, and the floor of a plain step: what it must read, at that bandwidth.

benchmarks/gpu/run.sh --only bandwidth
"""

from _harness import Bench, Figure, Result, run
from _model import llama_config, plain_step_bytes, shape_facts

CONTEXT = 1024


def measure(bench: Bench) -> Result:
    """Measures copies of 4 GiB within device memory."""
    config = llama_config(bench)
    bandwidth = bench.copy_bytes_per_s()
    step_bytes = plain_step_bytes(config, bench.dtype.itemsize, CONTEXT)
    figures = [
        Figure("copy bandwidth", bandwidth / 1e9, "GB/s"),
        Figure("bytes of a plain step", step_bytes / 1e9, "GB"),
        Figure("floor of a plain step", step_bytes / bandwidth * 1e3, "ms"),
    ]
    return Result(shape_facts(config, bench.dtype) | {"context": f"{CONTEXT} tokens, batch 1"}, figures)


if __name__ == "__main__":
    run(__doc__, measure)
