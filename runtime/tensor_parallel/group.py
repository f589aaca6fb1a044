"""The processes (ranks) that run a verifier together, and a list of the features that tensor parallelism does not
support. Does not import torch.
"""

from pathlib import Path
from typing import NamedTuple

from wingbeat.runtime.refusals import Feature, Known, Refusal

RANKS = "`tensor_parallel_size` above 1"
PART_OF_GPU = "a share of a GPU"
THREADS_TRIED = "`threads` 0"
NO_PLAN = "a model without a tensor parallel plan in transformers"
KV_READER = "a drafter that reads the verifier's KV"
REFUSED = (
    Refusal(Feature.DETERMINISTIC, RANKS, "sums over ranks have no fixed order"),
    Refusal(Feature.FP8_KV, RANKS, "the ranks' KV cache is not quantised", "use auto"),
    Refusal(Feature.INT8, RANKS, "packed weights are not divided", "leave dtype out"),
    Refusal(Feature.ENGINE_DIR, RANKS, "TensorRT engines are not divided", "leave engine_dir out"),
    Refusal(PART_OF_GPU, RANKS, "each rank needs a whole GPU", "use 1"),
    Refusal(THREADS_TRIED, RANKS, "all ranks would try thread counts at once", "give a number"),
    Refusal(
        Feature.OTHER_NODE,
        RANKS,
        "ranks and their drafter are on one node",
        "leave out drafter_resources, and channel remote",
    ),
    Refusal(Feature.DRAFTER_IN_ENGINE, RANKS, "one rank's GPU would hold more than the others'", "use actor"),
    Refusal(RANKS, Feature.QUANTISED, "packed weights are not divided", known=Known.LOADED),
    Refusal(RANKS, NO_PLAN, "no plan defines how to divide it", known=Known.LOADED),
    Refusal(KV_READER, RANKS, "each rank has some of the heads", "use another drafter", Known.LOADED),
)


class RankGroup(NamedTuple):
    """The processes that run one verifier together, each with a part of its weights."""

    store: Path
    """File through which the processes find each other; must not exist at the start."""
    size: int
