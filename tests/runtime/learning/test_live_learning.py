"""The whole way in one process: rounds that are served are learnt from, a better head is found by measurement and takes
over between two rounds, more is accepted from then on, and every text stays what it was."""

import time

import pytest
import torch

from tests.runtime.learning.test_learner import PLENTY, TOKENS, code_prompts, damaged_demo, settings_of, turned
from tests.runtime.models import TREE, Run, engine_config, greedy_params
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.fingerprint import checkpoint_fingerprint
from wingbeat.runtime.inner_drafter import attach
from wingbeat.runtime.learning.head_counts import Accepted
from wingbeat.runtime.learning.head_follower import HeadFollower
from wingbeat.runtime.learning.learner import Learner
from wingbeat.runtime.recordings.format import RecordingSpec
from wingbeat.runtime.recordings.live import LiveRecording
from wingbeat.runtime.recordings.ring import RingWriter, RoundRing

SERVED, ASKED = 160, 16
FOLLOWED_S = 20.0

pytestmark = pytest.mark.slow


class Server:
    """An engine whose rounds are kept, and its drafter, which follows a ledger."""

    def __init__(self, kind, root):
        loaded, drafter = kind.ref.loaded, kind.drafter(TREE)
        spec = RecordingSpec(
            verifier="v",
            fingerprint=checkpoint_fingerprint(kind.target.path),
            tap_layers=drafter.needs.tap_layers,
            hidden_size=loaded.hidden_size,
            num_layers=len(loaded.layers),
            vocab_size=loaded.vocab_size,
            taps_dtype="bfloat16",
            top_k=0,
            logits_dtype="float32",
            settings={"source": "live"},
        )
        self.writer = RingWriter(RoundRing(root / "rounds", PLENTY, 1e6), spec, flush_s=0.1)
        self.worker = DraftWorker(drafter)
        self.engine = Engine(loaded, engine_config(TREE, num_kv_blocks=400), drafter.needs)
        attach(self.engine, self.worker, InProcessChannel)
        self.engine.observe(LiveRecording(self.writer, 1.0, spec.taps_size, torch.bfloat16))

    def complete(self, prompts, learn):
        return Run(self.engine, prompts, greedy_params(TOKENS, learn=learn)).finish()

    def accepted(self, version):
        """Tokens per round of a version so far."""
        return Accepted(*self.engine.stats().by_head[version]).length


def test_what_is_served_makes_the_head_better_while_it_serves_and_changes_no_text(tmp_path):
    kind, root = damaged_demo(tmp_path / "head"), tmp_path / "root"
    server = Server(kind, root)
    served, asked = code_prompts(kind, SERVED), code_prompts(kind, SERVED + ASKED)[SERVED:]
    before = server.complete(asked, learn=False)
    of_configured = server.accepted(0)
    server.complete(served, learn=True)
    learner = Learner(settings_of(kind, root, batch_size=4, learning_rate=2e-3, candidate_steps=30, least_held=20))
    HeadFollower(learner.ledger, server.worker).start()
    turned(learner, lambda: learner.ledger.read().served)
    limit = time.monotonic() + FOLLOWED_S
    while server.worker.watch.head_version == 0 and time.monotonic() < limit:
        server.complete(served[:1], learn=False)
    assert server.worker.watch.head_version == 1
    after = server.complete(asked, learn=False)
    server.engine.model.remove_taps()
    server.writer.close()
    assert after == before
    assert server.accepted(1) > 1.05 * of_configured
    assert learner.ledger.read().version(1).taken
