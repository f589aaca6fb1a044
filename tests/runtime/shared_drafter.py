"""Several engines on one drafter, all in one thread."""

from tests.runtime.models import Run, eagle_drafter, greedy_params
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.protocol.messages import RoundHeader

LENGTH = 40


class RecordingEnd:
    """A verifier's end that keeps a copy of every tree it gets."""

    def __init__(self, end):
        self._end = end
        self.trees = []

    def __getattr__(self, name):
        return getattr(self._end, name)

    def acquire_outcome(self, timeout_s):
        self._outcome = self._end.acquire_outcome(timeout_s)
        return self._outcome

    def wait_reply(self, round_number, timeout_s, **by):
        slots = self._outcome.proposal_slots[: RoundHeader.read(self._outcome.header).num_proposals].clone()
        reply = self._end.wait_reply(round_number, timeout_s, **by)
        if reply is None:
            return None
        self.trees.append([field[slots].tolist() for field in (reply.token_ids, reply.parents, reply.num_valid)])
        return reply


class Verifier:
    """An engine, its channel and its requests; the drafter runs where the engine would wait."""

    def __init__(self, loaded, config, worker, name, prompts):
        self.engine = Engine(loaded, config, worker.drafter.needs)
        self.channel = InProcessChannel(self.engine.channel_spec)
        worker.attach(name, self.channel.drafter_end)
        self.channel.pump = worker.run_once
        self.end = RecordingEnd(self.channel.verifier_end)
        self.engine.attach_drafter(self.end)
        self.run = Run(self.engine, prompts, greedy_params(LENGTH))

    def move_to(self, worker, name):
        """Attach another drafter in the place of the one that is gone."""
        self.channel.attach(self.channel.drafter_end.incarnation + 1)
        worker.attach(name, self.channel.drafter_end)
        self.channel.pump = worker.run_once
        self.engine.attach_drafter(self.end)

    def close(self):
        self.engine.check_integrity()
        self.engine.model.remove_taps()


def alone(ref, config, prompts):
    """A verifier with a drafter of its own, at the end of its requests."""
    one = Verifier(ref.loaded, config, DraftWorker(eagle_drafter(ref.loaded, config.speculation)), "a", prompts)
    one.run.finish()
    one.close()
    return one


def run_all(verifiers):
    """Rounds in turn until every request has ended."""
    while any(one.engine.has_unfinished_requests() for one in verifiers):
        for one in verifiers:
            if one.engine.has_unfinished_requests():
                one.run.step()
