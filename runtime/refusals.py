"""Table of feature pairs that exclude each other, checked at start or when a model loads, and shown in the docs."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple


class Feature(StrEnum):
    """A setting, or a property of a model or machine; the enum's value is the feature's name in the documents."""

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
    """Time at which both features of a pair are known."""

    AT_START = "at the start"
    LOADED = "when the model loads"


class Refusal(NamedTuple):
    """A refused pair of features."""

    one: str
    other: str
    why: str
    remedy: str = "leave one out"
    known: Known = Known.AT_START

    def sentence(self, said: Mapping[str, str]) -> str:
        """Returns one line for the user.

        Args:
            said: text of each feature's setting, such as "compile is True", by feature.
        """
        return f"{said[self.one]} and {said[self.other]}: {self.why}; {self.remedy}"


_F = Feature

REFUSED_TOGETHER = (
    Refusal(_F.CUDA_WITHOUT_SHARE, _F.CUDA, "the verifier needs a GPU, or a share of one", "give one, such as 0.5"),
    Refusal(_F.VERIFIER_SHARE, _F.CPU, "a verifier on the CPU uses no GPU", "use 0"),
    Refusal(_F.DRAFTER_SHARE, _F.CPU, "a drafter beside it runs on the CPU too", "use 0"),
    Refusal(_F.CUDA_GRAPHS, _F.CPU, "a CPU has no CUDA graphs", "leave it out"),
    Refusal(_F.DETERMINISTIC, _F.ENGINE_DIR, "an engine's products depend on the other rows in a batch"),
    Refusal(_F.DETERMINISTIC, _F.FP8_KV, "no deterministic kernel reads fp8 KV", "use auto"),
    Refusal(_F.FORCED_ACCEPTANCE, _F.DETERMINISTIC, "drawn acceptance makes the text depend on the drafts"),
    Refusal(_F.FORCED_ACCEPTANCE, _F.NO_DRAFTER, "nothing is drafted that could be accepted"),
    Refusal(_F.FP8_KV, _F.ENGINE_DIR, "a TensorRT engine's KV cache cannot be fp8", "use auto"),
    Refusal(_F.INT8, _F.CUDA, "only the CPU's kernels multiply by int8 weights", "use device cpu"),
    Refusal(_F.INT8, _F.ENGINE_DIR, "a TensorRT engine's weights are fixed when it is built", "leave dtype out"),
    Refusal(_F.CUDA_GRAPHS, _F.ENGINE_DIR, "a TensorRT engine's stages are captured in any case"),
    Refusal(
        _F.DRAFTER_WITHOUT_SHARE,
        _F.WEIGHTED_DRAFTER,
        "the drafter would run on the CPU",
        "give it a share too, such as 0.7 for the verifier and 0.3 of the same GPU, or 1 and 1 of two",
    ),
    Refusal(_F.DRAFTER_IN_ENGINE, _F.NO_DRAFTER, "there is no drafter to place", "leave drafter_place out"),
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
    Refusal(_F.DRAFTER_IN_ENGINE, _F.OWN_ENGINE, "that engine needs a drafter in its own process", "use actor"),
    Refusal(_F.DRAWN_TREE, _F.TEXT_DRAFTER, "earlier text ranks no candidates", "give a number"),
    Refusal(_F.NUM_REPLICAS, _F.AUTOSCALING, "both say how many pairs there are", "leave num_replicas out"),
    Refusal(_F.NO_WAIT, _F.SLEEP, "requests wait for the engine that they wake", "raise one"),
    Refusal(_F.NO_QUEUE, _F.SLEEP, "requests wait for the engine that they wake", "raise one"),
    Refusal(_F.INT8, _F.QUANTISED, "its weights are quantised already", "leave dtype out", Known.LOADED),
    Refusal(_F.FP8_DRAFTER, _F.DRAFTER_ENGINE, "an engine's weights are fixed", known=Known.LOADED),
)


def problem(said: Mapping[str, str], rows: Iterable[Refusal] = REFUSED_TOGETHER) -> str | None:
    """Returns the problem of a combination of features, in one line; None if no two features exclude each other.

    Args:
        said: text of the setting of each requested or present feature, by feature.
    """
    return next((one.sentence(said) for one in rows if one.one in said and one.other in said), None)


def refuse(said: Mapping[str, str], rows: Iterable[Refusal] = REFUSED_TOGETHER) -> None:
    """Raises ValueError, with the line of `problem`, if two features exclude each other."""
    if (wrong := problem(said, rows)) is not None:
        raise ValueError(wrong)
