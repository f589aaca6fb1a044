"""Engines whose stages are captured by keeping their functions, so that a replay reads what lies at bound addresses."""

from typing import NamedTuple

from tests.runtime.models import TREE, engine_config, random_head
from tests.runtime.tensorrt.engine_world import (
    LIMITS,
    as_it_is,
    base_config,
    base_session,
    draft_config,
    draft_session,
    engine_on,
)
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.tensorrt.block_drafter import BlockDrafter
from wingbeat.runtime.tensorrt.engine_drafter import EngineDrafter


class FakeGraphs:
    """Captures by keeping the function; captures of some stages fail.

    Args:
        session: whose stages run while something is captured.
        failing: stages whose capture raises.
    """

    def __init__(self, sessions, failing=()) -> None:
        self.sessions, self.failing = sessions, set(failing)
        self.num_replays = 0

    def new_pool(self):
        return object()

    def warm_up(self, function):
        function()

    def capture(self, function, pool):
        function()
        session = max(self.sessions, key=lambda one: one.last)
        stage = session.ran[-1]
        if stage in self.failing:
            raise RuntimeError(f"{stage} cannot be captured")
        bound = dict(session.bound[stage])

        def replay():
            session.bind(stage, bound)
            session.enqueue(stage)

        return replay, None

    def replay(self, graph) -> None:
        self.num_replays += 1
        graph()


class CapturedPair(NamedTuple):
    """An engine, its drafter, and what captures and replays."""

    engine: Engine
    drafter: EngineDrafter
    graphs: FakeGraphs

    def stages(self) -> set[str]:
        """Names of the stages that are replayed."""
        parts = self.engine.model.runner.stages, self.drafter.runner.stages
        return {str(stage) for part in parts for stage in part.captured}


def captured_pair(loaded, failing=(), head=None, built=LIMITS, extend=as_it_is, **fields) -> CapturedPair:
    """An engine whose stages are captured but for those that fail.

    Args:
        head: in the place of `random_head`.
        built: limits of the engines.
        extend: adds to the verifier.
        fields: of the engine's limits.
    """
    head = random_head(loaded) if head is None else head
    config = base_config(loaded, head.tap_layers, built)
    drafts = draft_config(head, config.encoder)
    session, draft = base_session(loaded, config), draft_session(head, drafts)
    count = iter(range(10**9))
    for one in (session, draft):
        _number_calls(one, count)
    graphs = FakeGraphs([session, draft], failing)
    if isinstance(head, OnePassHead):
        drafter = BlockDrafter(draft, drafts, head, TREE, graphs)
    else:
        drafter = EngineDrafter(draft, drafts, head.draft_token_ids, TREE, graphs)
    limits = engine_config(TREE, **{"max_num_seqs": 2, "num_kv_blocks": None} | fields)
    return CapturedPair(engine_on(session, config, limits, drafter, graphs, extend), drafter, graphs)


def _number_calls(session, count) -> None:
    """Let a session say when it ran last."""
    session.last = -1
    enqueue = session.enqueue

    def numbered(stage):
        session.last = next(count)
        enqueue(stage)

    session.enqueue = numbered
