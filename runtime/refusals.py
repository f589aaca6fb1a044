"""Pairs of features that do not go together: one table, for the start, for what only checkpoints tell, and for docs."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple


class Feature(StrEnum):
    """What can be asked for, or what a model or a machine has; the value is its name in the documents."""

    AUTOSCALING = "`autoscaling_config`"
    CPU = "a verifier on the CPU"
    CUDA = "a verifier on a GPU"
    CUDA_GRAPHS = "`cuda_graphs`"
    CUDA_WITHOUT_SHARE = "`num_gpus_per_verifier` 0"
    DETERMINISTIC = "`deterministic`"
    DRAWN_TREE = "`draft_top_k` that is a tree"
    DRAFTER_ENGINE = "a drafter that is a TensorRT engine"
    DRAFTER_IN_ENGINE = "`drafter_place` `engine`"
    DRAFTER_SHARE = "`num_gpus_per_drafter`"
    DRAFTER_WITHOUT_SHARE = "`num_gpus_per_drafter` 0"
    FORCED_ACCEPTANCE = "`forced_acceptance`"
    FP8_DRAFTER = "`drafter_weights` `fp8`"
    FP8_KV = "`kv_cache_dtype` `fp8`"
    INT8 = "`dtype` `int8`"
    NAMED_CHANNEL = "`channel` `shm` or `cuda_ipc`"
    NO_DRAFTER = "`drafter` `none`"
    NO_QUEUE = "`max_queued_requests` 0"
    NO_WAIT = "`engine_wait_s` 0"
    NUM_REPLICAS = "`num_replicas`"
    OTHER_NODE = "drafters on other nodes"
    OWN_ENGINE = "`engine_factory`"
    QUANTISED = "a quantised model"
    SLEEP = "`min_replicas` 0"
    ENGINE_DIR = "`engine_dir`"
    TEXT_DRAFTER = "a `drafter` that copies earlier text"
    VERIFIER_SHARE = "`num_gpus_per_verifier`"
    WEIGHTED_DRAFTER = "a drafter with weights, beside a verifier on a GPU"


class Known(StrEnum):
    """When both of a pair are known."""

    AT_START = "at the start"
    LOADED = "when the model loads"


class Refusal(NamedTuple):
    """A pair that is refused."""

    one: str
    other: str
    why: str
    remedy: str = "leave one out"
    known: Known = Known.AT_START

    def sentence(self, said: Mapping[str, str]) -> str:
        """One line for whoever asked for both.

        Args:
            said: how each of the two was asked for, such as "compile is True".
        """
        return f"{said[self.one]} and {said[self.other]}: {self.why}; {self.remedy}"


_F = Feature

REFUSED_TOGETHER = (
    Refusal(_F.CUDA_WITHOUT_SHARE, _F.CUDA, "it needs a GPU, or a share of one", "give one, such as 0.5"),
    Refusal(_F.VERIFIER_SHARE, _F.CPU, "no GPU is used there", "use 0"),
    Refusal(_F.DRAFTER_SHARE, _F.CPU, "beside it a drafter runs on the CPU", "use 0"),
    Refusal(_F.CUDA_GRAPHS, _F.CPU, "it has none", "leave it out"),
    Refusal(_F.DETERMINISTIC, _F.ENGINE_DIR, "its products depend on the rows beside"),
    Refusal(_F.DETERMINISTIC, _F.FP8_KV, "torch's operations attend to such KV", "use auto"),
    Refusal(_F.FORCED_ACCEPTANCE, _F.DETERMINISTIC, "it draws what is accepted, and texts with drafts are others"),
    Refusal(_F.FORCED_ACCEPTANCE, _F.NO_DRAFTER, "nothing is drafted that could be accepted"),
    Refusal(_F.FP8_KV, _F.ENGINE_DIR, "its engines round no KV", "use auto"),
    Refusal(_F.INT8, _F.CUDA, "the CPU's kernels alone read such weights", "use device cpu"),
    Refusal(_F.INT8, _F.ENGINE_DIR, "its engines hold the weights that they were built with", "leave dtype out"),
    Refusal(_F.CUDA_GRAPHS, _F.ENGINE_DIR, "it captures its own stages"),
    Refusal(
        _F.DRAFTER_WITHOUT_SHARE,
        _F.WEIGHTED_DRAFTER,
        "it would run on the CPU",
        "give it a share too, such as 0.7 for the verifier and 0.3 of the same GPU, or 1 and 1 of two",
    ),
    Refusal(_F.DRAFTER_IN_ENGINE, _F.NO_DRAFTER, "it leaves nothing to place", "leave drafter_place out"),
    Refusal(_F.DRAFTER_IN_ENGINE, _F.NAMED_CHANNEL, "there is no channel within a process", "leave channel out"),
    Refusal(
        _F.DRAFTER_IN_ENGINE,
        _F.OTHER_NODE,
        "the drafter is where the engine is",
        "leave out drafter_resources, and channel remote",
    ),
    Refusal(
        _F.DRAFTER_IN_ENGINE,
        _F.DRAFTER_SHARE,
        "the drafter is on the verifier's GPU",
        "add its share to num_gpus_per_verifier",
    ),
    Refusal(_F.DRAFTER_IN_ENGINE, _F.OWN_ENGINE, "that engine asks for a drafter's process", "use actor"),
    Refusal(_F.DRAWN_TREE, _F.TEXT_DRAFTER, "earlier text ranks no candidates", "give a number"),
    Refusal(_F.NUM_REPLICAS, _F.AUTOSCALING, "both say how many pairs there are", "leave num_replicas out"),
    Refusal(_F.NO_WAIT, _F.SLEEP, "requests wait for the engine that they wake", "raise one"),
    Refusal(_F.NO_QUEUE, _F.SLEEP, "requests wait for the engine that they wake", "raise one"),
    Refusal(_F.INT8, _F.QUANTISED, "its weights were rounded once", "leave dtype out", Known.LOADED),
    Refusal(_F.FP8_DRAFTER, _F.DRAFTER_ENGINE, "an engine's weights are fixed", known=Known.LOADED),
)


def problem(said: Mapping[str, str], rows: Iterable[Refusal] = REFUSED_TOGETHER) -> str | None:
    """What is wrong with what is asked for together, in one line; None where all of it goes together.

    Args:
        said: by each feature that is asked for or there, how that was said.
    """
    return next((one.sentence(said) for one in rows if one.one in said and one.other in said), None)


def refuse(said: Mapping[str, str], rows: Iterable[Refusal] = REFUSED_TOGETHER) -> None:
    """Raises ValueError, with one line, where two do not go together; as for `problem`."""
    if (wrong := problem(said, rows)) is not None:
        raise ValueError(wrong)
