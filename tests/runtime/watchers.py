"""Drafters and channel ends that watch what the verifier's side of drafting does."""

import random

import torch

from tests.runtime.models import TREE, Run, engine_config
from tests.runtime.scripted import right_tree, tree_tensors
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.drafters.base import Drafter, DrafterNeeds
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine

TAPS = (1, 3)


def dense_taps(ref, layers=TAPS):
    """By reference sequence: [num_tokens, taps_size], from transformers' own forward pass."""
    model = ref.loaded.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    taps = []
    for sequence in ref.sequences:
        with torch.no_grad():
            states = model(torch.tensor([sequence]), use_cache=False, output_hidden_states=True).hidden_states
        taps.append(torch.cat([states[layer] for layer in layers], dim=-1)[0])
    model.set_attn_implementation(before)
    return taps


class ContextDrafter(Drafter):
    """Keeps the pairs it is given where an EAGLE head keeps its KV, and checks them all before it proposes."""

    needs = DrafterNeeds(TAPS, keeps_context=True)

    def __init__(self, ref, taps):
        self.ref, self.true_taps = ref, taps
        self.pairs: dict[int, tuple[int, torch.Tensor]] = {}
        self.last: dict[int, int] = {}
        self.num_checked = 0
        self.random = random.Random(5)

    def resize(self, spec, num_slots, num_blocks):
        self.num_nodes, self.steps, self.block_size = spec.num_nodes, spec.max_path - 1, spec.block_size

    def commit(self, batch):
        taken = 0
        for slot, start, length in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            rows = slice(taken, taken + length)
            self._store(batch, slot, start, batch.chunk_next_token_ids[rows], batch.chunk_taps[rows])
            taken += length
        for row, slot in enumerate(batch.decode_slots.tolist()):
            count = int(batch.decode_num_tokens[row])
            tokens, taps = batch.decode_token_ids[row, :count], batch.decode_taps[row, :count]
            self._store(batch, slot, int(batch.decode_positions[row]), tokens, taps)

    def _store(self, batch, slot, start, tokens, taps):
        for offset, token in enumerate(tokens.tolist()):
            self.pairs[self._place(batch, slot, start + offset)] = (token, taps[offset].clone())
            self.last[slot] = start + offset

    def _place(self, batch, slot, position):
        block = int(batch.block_tables[slot, position // self.block_size])
        assert block > 0
        return block * self.block_size + position % self.block_size

    def propose(self, batch):
        histories, plans = [], []
        for slot in batch.proposal_slots.tolist():
            history = batch.token_ids[slot, : batch.committed_lens[slot]].tolist()
            upcoming = self._check(batch, slot, history)
            histories.append(history)
            plans.append(right_tree(upcoming, self.ref.loaded.vocab_size, self.random))
        return tree_tensors([history[-1] for history in histories], plans, self.num_nodes)

    def _check(self, batch, slot, history):
        sequences = self.ref.sequences
        if any(history[: len(sequence)] == sequence for sequence in sequences):
            return []  # decoded past its end, by a host that does not know of it yet
        index = next(i for i, sequence in enumerate(sequences) if sequence[: len(history)] == history)
        assert self.last[slot] == len(history) - 2, "the latest pair is not the last committed one"
        for position in range(len(history) - 1):
            token, taps = self.pairs[self._place(batch, slot, position)]
            assert token == history[position + 1], f"pair {position} has another sequence's token"
            torch.testing.assert_close(taps, self.true_taps[index][position], atol=1e-3, rtol=1e-3)
        self.num_checked += 1
        return self.ref.sequences[index][len(history) : len(history) + self.steps]


class Rig:
    """An engine whose drafter can be replaced; it answers at the end of each step, before slots change hands."""

    def __init__(self, ref, drafter, end_of=lambda end: end, speculation=TREE, **limits):
        self.ref = ref
        self.engine = Engine(ref.loaded, engine_config(speculation, **limits), drafter.needs)
        self.channel = InProcessChannel(self.engine.channel_spec)
        self.incarnation = 1
        self.attach(drafter, self.channel.drafter_end, end_of)

    def attach(self, drafter, drafter_end, end_of=lambda end: end):
        worker = DraftWorker(drafter)
        worker.attach("verifier", drafter_end)
        self.channel.pump = worker.run_once
        self.engine.attach_drafter(end_of(self.channel.verifier_end))

    def replace(self, drafter, end_of=lambda end: end):
        self.incarnation += 1
        self.attach(drafter, self.channel.attach(self.incarnation), end_of)

    def step(self, run):
        run.step()
        self.channel.pump()

    def finish(self, run):
        while self.engine.has_unfinished_requests():
            self.step(run)
        self.engine.check_integrity()
        return run.tokens

    def run(self, prompts, params):
        return self.finish(Run(self.engine, prompts, params))


class FailingEnd:
    """A verifier's end whose drafter stops answering."""

    def __init__(self, end, what, after, alive):
        self._end, self._what, self._left, self._alive = end, what, after, alive

    def __getattr__(self, name):
        return getattr(self._end, name)

    def fail(self):
        """From now on."""
        self._left = 0

    def _fails(self, what):
        self._left -= what == self._what
        return what == self._what and self._left < 0

    def peer_alive(self):
        return self._alive if self._left < 0 else self._end.peer_alive()

    def acquire_outcome(self, timeout_s):
        return None if self._fails("acquire") else self._end.acquire_outcome(timeout_s)

    def wait_reply(self, round_number, timeout_s, **by):
        return None if self._fails("wait") else self._end.wait_reply(round_number, timeout_s, **by)


class SilentEnd:
    """A verifier's end whose drafter does not answer for a while; keeps how long it was asked to wait."""

    def __init__(self, end):
        self._end = end
        self.silent: set[str] = set()
        """Calls that find nothing, `wait_reply` and `acquire_outcome`; while there are some, no answer is there."""
        self.alive = True
        self.waited: list[float] = []

    def __getattr__(self, name):
        return getattr(self._end, name)

    def peer_alive(self):
        return self.alive and self._end.peer_alive()

    def acquire_outcome(self, timeout_s):
        self.waited.append(timeout_s)
        return None if "acquire_outcome" in self.silent else self._end.acquire_outcome(timeout_s)

    def wait_reply(self, round_number, timeout_s, **by):
        self.waited.append(timeout_s)
        silent = "wait_reply" in self.silent or (self.silent and timeout_s == 0)
        return None if silent else self._end.wait_reply(round_number, timeout_s, **by)
