"""A worker answers its verifier's rounds, wherever the channel and the drafter are."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.runtime.graphs.test_graph_runner import FakeDevice
from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy_params,
    random_head,
    reference,
)
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.cluster.channels.memory import HOST_FIELDS
from wingbeat.runtime.drafters import draft_stages, eagle, prompt_stage, staged_drafter
from wingbeat.runtime.drafters import worker as draft_worker
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.drafters.outcome_batch import batch_of
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.protocol import transfer
from wingbeat.runtime.protocol.messages import (
    ChannelSpec,
    Outcome,
    RoundHeader,
    TreeReply,
    outcome_layout,
    reply_layout,
)

pytestmark = pytest.mark.few(1)


def told(ref):
    return ScriptedDrafter(ref.sequences, right_tree, ref.loaded.vocab_size)


def test_a_channel_that_does_not_fit_is_refused_and_another_takes_the_place_of_the_one_before():
    ref = reference("llama")
    drafter = eagle_drafter(ref.loaded, TREE)
    worker = DraftWorker(drafter)
    engine = Engine(ref.loaded, engine_config(TREE), drafter.needs)
    engine.model.remove_taps()
    spec = engine.channel_spec
    with pytest.raises(ValueError, match="taps of size 64"):
        worker.attach("a", InProcessChannel(replace(spec, taps_size=64)).drafter_end)
    assert worker.ends == []
    first, second = InProcessChannel(spec), InProcessChannel(spec)
    worker.attach("a", first.drafter_end)
    worker.attach("b", second.drafter_end)
    assert worker.names == ["b"]
    assert not first.verifier_end.peer_alive()
    worker.detach("never seen")
    assert second.verifier_end.peer_alive()
    worker.detach("b")
    assert worker.ends == []
    assert not worker.run_once()


def test_rounds_without_proposals_are_answered():
    """The reply frees the round's buffers, even if no request in the round wants a tree."""
    ref = reference("llama")
    worker = DraftWorker(told(ref))
    engine = Engine(ref.loaded, engine_config(max_num_batched_tokens=4))
    channel = InProcessChannel(engine.channel_spec)
    worker.attach("a", channel.drafter_end)
    channel.pump = worker.run_once
    engine.attach_drafter(channel.verifier_end)
    run = Run(engine, [ref.prompts[4]], greedy_params(8))
    assert run.finish() == [ref.continuations[4][:8]]
    assert engine.drafter_state == "attached"
    assert torch.equal(channel.verifier_end.token_ids[0, :64], torch.tensor(ref.prompts[4]))


class NoMixing(TorchDispatchMode):
    """Stands for a machine with a device ("meta"): fails operations that mix host and device, except copies."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {tensor.device.type for tensor in tensors if tensor.dim()}
        copies = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        assert len(places) < 2 or func in copies, f"{func} mixes {places}"
        return func(*args, **(kwargs or {}))


class DeviceChannelEnd:
    """A drafter's end whose fields lie as in a `cuda_ipc` channel, with one round that waits."""

    def __init__(self, spec: ChannelSpec, device: str) -> None:
        def place(layout: dict) -> list[torch.Tensor]:
            where = {name: "cpu" if name in HOST_FIELDS else device for name in layout}
            return [torch.zeros(shape, dtype=dtype, device=where[name]) for name, (shape, dtype) in layout.items()]

        self.spec, self.closed, self.num_replies = spec, False, 0
        self.token_ids = torch.zeros(spec.num_slots, spec.max_model_len + 1, dtype=torch.int64, device=device)
        self.outcome, self.reply = Outcome(*place(outcome_layout(spec))), TreeReply(*place(reply_layout(spec)))

    def ask(self, decodes: list[int], chunks: list[int], proposals: list[int], longest: int = 0) -> None:
        outcome = self.outcome
        RoundHeader(1, len(decodes), len(chunks), len(proposals), 2, longest).write(outcome.header)
        for slots, field in ((decodes, "decode_slots"), (chunks, "chunk_slots"), (proposals, "proposal_slots")):
            getattr(outcome, field)[: len(slots)] = torch.tensor(slots)
        outcome.chunk_lens[: len(chunks)] = 5

    def poll_outcome(self) -> Outcome | None:
        return self.outcome

    def has_outcome(self) -> bool:
        return True

    def publish_reply(self) -> None:
        self.num_replies += 1


def device_spec(speculation, taps_size):
    return ChannelSpec(4, speculation.num_nodes, speculation.max_path, 32, taps_size, 64, 8, 16, 40)


def upload_to_meta(values, device, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype).to(device)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("speculation", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_device_channel_is_served_without_reading_the_device(speculation, captured, monkeypatch):
    serve_from_meta(DraftWorker, 1, speculation, captured, monkeypatch)


def serve_from_meta(make_worker, num_verifiers, speculation, captured, monkeypatch):
    """A tensor on "meta" has no data: reading one, or indexing it by what lies on the host, fails."""
    for module in (draft_worker, eagle, staged_drafter):
        monkeypatch.setattr(module, "upload", upload_to_meta)
    for module in (draft_stages, prompt_stage):
        monkeypatch.setattr(module, "upload_into", lambda to, values: to.copy_(upload_to_meta(values, to.device)))
    head = random_head(reference("llama").loaded).to("meta")
    drafter = EagleDrafter(head, speculation, FakeDevice() if captured else None)
    worker = make_worker(drafter)
    spec = device_spec(speculation, head.fc.in_features)
    ends = [DeviceChannelEnd(spec, "meta") for _ in range(num_verifiers)]
    for index, end in enumerate(ends):
        worker.attach(str(index), end)
    for decodes, chunks, proposals in (([0, 2], [1], [0, 1, 2]), ([3], [], []), ([], [1, 2], []), ([], [], [])):
        for end in ends:
            end.ask(decodes, chunks, proposals)
        with NoMixing():
            assert worker.run_once()
    assert [end.num_replies for end in ends] == [4] * num_verifiers
    if captured:
        assert drafter.graph_stats.replays == {Stage.DRAFT_PROPOSAL: 1, Stage.DRAFT_ACCEPT: 1, Stage.DRAFT_PREFILL: 2}


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: there[here],
        lambda here, there: torch.cat([here, there]),
        lambda here, there: here.copy_(there),
        lambda here, there: int(there.max()),
        lambda here, there: there.tolist(),
    ],
    ids=["index", "cat", "download", "number", "list"],
)
def test_the_machine_with_a_device_notices_what_a_gpu_would_wait_for(mix):
    here, there = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64, device="meta")
    with NoMixing(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        mix(here, there)


@pytest.mark.parametrize(("said", "expected"), [(0, 64), (23, 23)])
def test_on_a_device_the_longest_sequence_is_what_the_verifier_says(said, expected):
    head = random_head(reference("llama").loaded).to("meta")
    worker = DraftWorker(EagleDrafter(head, TREE))
    end = DeviceChannelEnd(device_spec(TREE, head.fc.in_features), "meta")
    worker.attach("a", end)
    end.ask([0], [], [0], longest=said)
    batch = batch_of(end, end.outcome, torch.device("meta"))
    assert batch.max_committed_len == expected
    assert batch.max_levels == 2
    assert {batch.decode_slots.device.type, batch.proposal_slots.device.type} == {"cpu"}
    assert batch.decode_taps.device.type == batch.token_ids.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.parametrize("channel_device", ["cuda", "cpu"])
@pytest.mark.parametrize("drafter_device", ["cuda", "cpu"])
def test_a_drafter_serves_channels_on_either_side(channel_device, drafter_device):
    serve_on_either_side(DraftWorker, 1, channel_device, drafter_device)


def serve_on_either_side(make_worker, num_verifiers, channel_device, drafter_device):
    """A drafter without taps and EAGLE answer alike, wherever the channel and the drafter are."""
    ref = reference("llama")

    def eagle():
        return EagleDrafter(random_head(ref.loaded).to(drafter_device), TREE)

    def scripted():
        return ScriptedDrafter(ref.sequences, right_tree, ref.loaded.vocab_size)

    for make in (eagle, scripted):
        drafters = [make(), make()]
        taps_size = drafters[0].head.fc.in_features if isinstance(drafters[0], EagleDrafter) else 0
        replies = []
        for drafter, device in zip(drafters, (channel_device, drafter_device), strict=True):
            worker = make_worker(drafter)
            ends = [DeviceChannelEnd(device_spec(TREE, taps_size), device) for _ in range(num_verifiers)]
            for index, end in enumerate(ends):
                worker.attach(str(index), end)
                end.outcome.committed_lens.fill_(6)
                end.outcome.block_tables.copy_(1 + torch.arange(32).view(4, 8))
                end.outcome.decode_num_tokens.fill_(2)
                end.outcome.chunk_positions[:1] = 0
                end.token_ids.copy_(torch.arange(4 * 65).view(4, 65) % 3)
                end.ask([0, 2], [1], [0, 1, 2])
            assert worker.run_once()
            replies += [[field[:3].tolist() for field in end.reply[3:6]] for end in ends]
        assert replies[:num_verifiers] == replies[num_verifiers:]


def test_uploads_of_the_worker_are_those_of_the_runtime():
    """Functions that the tests above replace are those that a GPU runs."""
    assert draft_worker.upload is eagle.upload is staged_drafter.upload is transfer.upload
    assert draft_stages.upload_into is transfer.upload_into
