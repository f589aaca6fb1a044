"""An engine and its drafter at the two ends of a remote channel: same text, and not one draft less accepted.

A drafter that lacked anything of what counts, at any position of any sequence, would draft other trees.
"""

import threading

import pytest

from tests.runtime.drafter_kinds import KINDS, USER_DRAFTER, Kind
from tests.runtime.models import Run, engine_config, greedy_params, new_engine
from wingbeat.cluster.channels.tcp.remote_channel import RemoteChannel
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.protocol.messages import ChannelSpec
from wingbeat.runtime.scheduling.request import SamplingParams

NUM_TOKENS = 24
WAIT_S = 0.1


class Loopback:
    """Both ends of a remote channel in this process; the drafter's end works in a thread of its own."""

    def __init__(self, spec: ChannelSpec) -> None:
        self.channel = RemoteChannel("127.0.0.1", spec)
        self.verifier_end = self.channel.verifier_end
        self.drafter_end = RemoteChannel.attach(self.channel.name, 1)
        self.pump = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.drafter_end.closed:
            if self.pump is not None and self.drafter_end.wait_outcome(WAIT_S) is not None:
                self.pump()
        self.drafter_end.close()

    def close(self) -> None:
        """Let the drafter's thread end."""
        self.verifier_end.close()
        self.thread.join()


IN_EVERY_RUN = ("eagle3", "ngram")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in KINDS if name not in IN_EVERY_RUN]


@pytest.fixture(scope="module", params=[*IN_EVERY_RUN, *OTHERS])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kind:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(USER_DRAFTER)
        yield KINDS[request.param](tmp_path_factory.mktemp(request.param))


def mixed_params() -> list[SamplingParams]:
    """Greedy, sampled, and without speculation."""
    sampled = [SamplingParams(NUM_TOKENS, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(3)]
    plain = greedy_params(NUM_TOKENS, speculation=False)
    return [*[greedy_params(NUM_TOKENS)] * 4, *sampled, plain]


def drafts(engine: Engine) -> tuple[int, int]:
    return engine.speculation.num_drafts, engine.speculation.num_accepted_tokens


@pytest.mark.few(1)
def test_text_and_drafts_are_those_of_a_channel_in_memory(kind: Kind) -> None:
    """Twice the same prompts, so that prefixes are cached the second time; few blocks, so that some are preempted."""
    config = engine_config(block_size=4, num_kv_blocks=90)
    beside = new_engine(kind.ref.loaded, config, kind.drafter(config.speculation))
    expected = [Run(beside, kind.ref.prompts, mixed_params()).finish() for _ in range(2)]
    beside.model.remove_taps()
    made: list[Loopback] = []
    remote = build_engine(
        kind.ref.loaded,
        config,
        kind.drafter(config.speculation),
        lambda spec: made.append(Loopback(spec)) or made[0],
    )
    got = [Run(remote, kind.ref.prompts, mixed_params()).finish() for _ in range(2)]
    assert got == expected
    assert expected[0][:4] == [tokens[:NUM_TOKENS] for tokens in kind.ref.continuations[:4]]
    assert remote.drafter_state == "attached"
    assert drafts(remote) == drafts(beside)
    assert remote.stats().num_preemptions > 0
    remote.model.remove_taps()
    made[0].close()


@pytest.mark.few(1)
def test_a_connection_cut_in_the_middle_costs_no_token_and_another_takes_over(kind: Kind) -> None:
    config = engine_config()
    made: list[Loopback] = []
    engine = build_engine(
        kind.ref.loaded,
        config,
        kind.drafter(config.speculation),
        lambda spec: made.append(Loopback(spec)) or made[0],
    )
    run = Run(engine, kind.ref.prompts, greedy_params(NUM_TOKENS))
    for _ in range(5):
        run.step()
    made[0].drafter_end._link.connection._sock.shutdown(2)
    made[0].thread.join()
    for _ in range(2):
        run.step()
    assert engine.drafter_state == "lost"
    before = engine.speculation.num_drafts
    worker = DraftWorker(kind.drafter(config.speculation))
    end = RemoteChannel.attach(made[0].channel.name, 2)
    worker.attach("again", end)
    made[0].drafter_end, made[0].pump = end, worker.run_once
    made[0].thread = threading.Thread(target=made[0]._run, daemon=True)
    made[0].thread.start()
    engine.attach_drafter(made[0].verifier_end)
    assert run.finish() == [tokens[:NUM_TOKENS] for tokens in kind.ref.continuations]
    assert engine.drafter_state == "attached"
    assert engine.speculation.num_drafts > before
    engine.model.remove_taps()
    made[0].close()
