"""The CUDA branches of engine and drafters, run on a GPU of shapes: the host waits where it may, and nowhere else."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.needs import needs
from tests.runtime.fake_gpu import CARD, CUDA, FREE_BYTES, FakeGpu, HostWaitError, MixedDevicesError
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import (
    ALTERED,
    CHAIN,
    GREEDY,
    PLAIN,
    SAMPLED,
    TREE,
    engine_config,
    new_drafter,
    serve,
    verifier,
)
from tests.runtime.launch_counts import attach
from tests.runtime.watchers import SilentEnd
from wingbeat.kernels.tree.candidates import top_candidates
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.engine import drafter_client as drafting
from wingbeat.runtime.engine import outcome_writer
from wingbeat.runtime.engine.drafter_waits import FIRST_REPLY_S, LEAST_S
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.kv.pool import memory_budget
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.protocol import transfer

pytestmark = pytest.mark.few(2)

SHAPES = {"chain": CHAIN, "tree": TREE}
KINDS = ("eagle-3", "eagle-1", "draft-model", "mtp", "shared_keys", "dflash", "dspark", "dflash2", "p-eagle")


@pytest.mark.few(1)
@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_wait_for_the_device_in_their_one_wait_alone(gpu, kind, shape, num_slots):
    """Prompts in chunks beside greedy, sampled and plain sequences, which come and go."""
    drafter = new_drafter(kind, SHAPES[shape], FakeGraphDevice(gpu))
    served = serve(gpu, engine_config(SHAPES[shape], num_slots), drafter, [GREEDY, SAMPLED, PLAIN])
    stats = served.engine.runner.graphs.stats
    assert stats.failed == []
    assert stats.replays[Stage.BASE_VERIFICATION]
    assert served.engine.drafter_state == "attached"
    stats = drafter.graph_stats
    assert stats.failed == []
    assert not stats.eager_runs
    assert stats.replays[Stage.DRAFT_PROPOSAL]


@pytest.mark.few(1)
@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("kind", ["eagle-3", "none"])
def test_masked_rounds_overlap_and_wait_in_their_one_wait_alone(gpu, kind, num_slots):
    drafter = None if kind == "none" else new_drafter(kind, TREE, FakeGraphDevice(gpu))
    masked = replace(GREEDY, bad_words=((3, 5), (4, 6, 7)), max_tokens=8)
    served = serve(gpu, engine_config(TREE, num_slots), drafter, [masked, SAMPLED])
    stats = served.engine.runner.graphs.stats
    assert stats.failed == []
    assert served.engine.overlap
    assert kind == "none" or stats.replays[Stage.BASE_VERIFICATION]


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["draft-model", "mtp", "shared_keys", "dflash", "dspark", "dflash2", "p-eagle"])
def test_without_graphs_drafts_wait_no_more(gpu, kind, shape, num_slots):
    drafter = new_drafter(kind, SHAPES[shape], None)
    served = serve(gpu, engine_config(SHAPES[shape], num_slots), drafter, [GREEDY, SAMPLED, PLAIN])
    assert drafter.graph_stats is None
    assert served.engine.drafter_state == "attached"


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_rounds_that_alter_logits_and_report_them_wait_in_their_one_wait_alone(
    gpu, num_slots, adaptive, tmp_path, monkeypatch
):
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path))
    shape = replace(TREE, adaptive=adaptive)
    drafter = new_drafter("eagle-3", shape, FakeGraphDevice(gpu))
    served = serve(gpu, engine_config(shape, num_slots, cuda_graphs=True), drafter, [ALTERED, GREEDY])
    stats = served.engine.runner.graphs.stats
    assert stats.failed == []
    assert set(stats.eager_runs) <= {Stage.BASE_MIXED, Stage.BASE_PROMPTS}, "prompts that are reported"
    # On shapes alone the policy learns nothing that would make it draft.
    assert adaptive or stats.replays[Stage.BASE_VERIFICATION]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_a_drafter_on_the_host_is_waited_for_where_its_channel_is_written_and_read(gpu, kind):
    collect = drafting.DrafterClient.collect.__wrapped__
    gpu.waits_in |= {function.__code__ for function in (transfer.copy_all, outcome_writer.write_history, collect)}
    served = serve(gpu, engine_config(TREE, 3), new_drafter(kind, TREE, None), [GREEDY, SAMPLED], on_device=False)
    assert served.engine.runner.graphs.stats.failed == []
    assert served.engine.drafter_state == "attached"


@needs("adaptive")
@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 3])
def test_adaptive_rounds_wait_in_their_one_wait_alone(gpu, num_slots, tmp_path, monkeypatch):
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path))
    shape = SpeculationConfig(draft_steps=3, draft_top_k=3, verify_tree_size=8, adaptive=True)
    drafter = new_drafter("eagle-3", shape, FakeGraphDevice(gpu))
    served = serve(gpu, engine_config(shape, num_slots, cuda_graphs=True), drafter, [GREEDY, SAMPLED])
    assert served.engine.stats().policy is not None
    assert served.engine.runner.graphs.stats.failed == []
    assert served.engine.drafter_state == "attached"


@pytest.mark.slow
def test_kernels_of_a_first_chunk_were_run_before_a_round_waits_for_them(gpu):
    drafter = new_drafter("eagle-3", TREE, FakeGraphDevice(gpu))
    spec = attach(drafter, TREE, num_slots=3)
    known = set(gpu.variants)
    engine = Engine(verifier(), engine_config(TREE, 3), drafter.needs, FakeGraphDevice(gpu))
    assert engine.channel_spec.taps_size == spec.taps_size
    gpu.variants.clear()
    drafter._warm_up(spec)
    assert gpu.variants
    assert gpu.variants <= known


@pytest.mark.parametrize("adaptive", [True, False])
def test_rounds_go_on_while_a_drafter_is_silent(gpu, adaptive, tmp_path, monkeypatch):
    """Its first answer may take as long as compiling its kernels does, of which nobody notices anything."""
    monkeypatch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path))
    shape, ends = replace(CHAIN, adaptive=adaptive), []

    def build(*args) -> Engine:
        engine = build_engine(*args)
        ends.append(SilentEnd(engine.drafting._end))
        engine.attach_drafter(ends[0])
        ends[0].silent = {"wait_reply", "acquire_outcome"}
        ends[0].waited.clear()
        return engine

    drafter = new_drafter("eagle-3", shape, FakeGraphDevice(gpu))
    long = replace(GREEDY, max_tokens=24, force_drafts=adaptive)
    served = serve(gpu, engine_config(shape, 3, cuda_graphs=True), drafter, [long], build=build)
    assert served.engine.drafter_state == "late"
    assert served.engine.drafting.waits.patience_s == FIRST_REPLY_S
    assert 0 < max(ends[0].waited) == LEAST_S
    assert [timeout_s > 0 for timeout_s in ends[0].waited].count(True) <= 2
    assert served.engine.stats().plain_rounds["drafter_late"] > 24


def test_the_pool_of_a_gpu_is_the_engines_share_of_what_is_free(gpu):
    whole = memory_budget(EngineConfig(), CUDA)
    assert FREE_BYTES * 0.8 <= whole < FREE_BYTES
    assert memory_budget(EngineConfig(gpu_share=0.5), CUDA) == whole // 2
    assert memory_budget(EngineConfig(kv_cache_memory_bytes=1 << 20), CUDA) == 1 << 20
    assert memory_budget(EngineConfig(gpu_memory_utilization=0.45), CUDA) == whole // 2


def rows(gpu: FakeGpu) -> torch.Tensor:
    return torch.zeros(8, 4, device=CUDA)


BAD: dict[str, tuple[type[Exception], Callable[[torch.Tensor], object]]] = {
    "item": (HostWaitError, lambda x: x.sum().item()),
    "truth": (HostWaitError, lambda x: bool((x > 0).any())),
    "list": (HostWaitError, lambda x: x[0].tolist()),
    "to-host": (HostWaitError, lambda x: x.cpu()),
    "into-host": (HostWaitError, lambda x: torch.zeros(8, 4).copy_(x, non_blocking=True)),
    "pageable": (HostWaitError, lambda x: torch.zeros(3).to(CUDA, non_blocking=True)),
    "new-tensor": (HostWaitError, lambda x: torch.tensor([1, 2], device=CUDA)),
    "mask": (HostWaitError, lambda x: x[x > 0]),
    "nonzero": (HostWaitError, lambda x: x.nonzero()),
    "host-index": (MixedDevicesError, lambda x: x[torch.tensor([1, 2])]),
    "host-operand": (MixedDevicesError, lambda x: x + torch.ones(4)),
    "host-kernel-argument": (
        MixedDevicesError,
        lambda x: top_candidates(x[:, None], torch.arange(4), 2, None),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_gpu_would_wait_for_or_refuse_is_an_error(gpu, name):
    error, call = BAD[name]
    x = rows(gpu)
    gpu.strict = True
    with torch.inference_mode(), pytest.raises(error):
        call(x)


def test_what_a_gpu_does_without_a_wait_is_none(gpu):
    x = rows(gpu)
    gpu.strict = True
    with torch.inference_mode():
        x[transfer.upload([1, 2], CUDA)] = 0
        arrived = transfer.Download([x[:, 0].long(), x[0].long()]).wait()
    assert [part.shape for part in arrived] == [(8,), (4,)]


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "device": lambda x: x.to(CUDA),
    "device-dtype": lambda x: x.to(CUDA, torch.bfloat16),
    "named": lambda x: x.to(device=CUDA, dtype=torch.bfloat16),
    "another's": lambda x: x.to(torch.zeros(1, dtype=torch.bfloat16, device=CUDA)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_a_move_to_the_device_is_an_upload_in_whatever_way_it_is_said(gpu, name, inference):
    with torch.inference_mode(inference):
        moved = MOVES[name](torch.ones(3))
        assert moved.device == CUDA
        assert moved.dtype == (torch.float32 if name == "device" else torch.bfloat16)
        back = moved.to("cpu", torch.float64)
        assert (back.device.type, back.dtype) == ("cpu", torch.float64)
        gpu.strict = True
        with pytest.raises(HostWaitError, match="pageable"):
            MOVES[name](torch.ones(3))


def test_the_card_says_what_it_can(gpu):
    found = torch.cuda.get_device_properties(CUDA)
    assert (found.major, found.minor) == torch.cuda.get_device_capability(CUDA)
    assert found.multi_processor_count == CARD["multi_processor_count"]


def test_nothing_touches_the_host_in_a_capture(gpu):
    x = rows(gpu)
    with gpu.capture() as launches, torch.inference_mode():
        torch.add(x, x)
        with pytest.raises(MixedDevicesError):
            transfer.upload([1, 2], CUDA)
    assert launches == Counter(add=1)
