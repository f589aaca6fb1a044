"""The engine's process, in which one thread loads the model and runs its rounds.

`EngineLife` starts the process with the link's file descriptors and the replica's process id as arguments.
"""

import gc
import logging
import os
import pickle
import signal
import sys
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

from wingbeat.cluster.channels.link import Link
from wingbeat.cluster.child_process import die_with_parent, show_stacks
from wingbeat.cluster.cores import pin_thread
from wingbeat.cluster.placement import claim_devices
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.log import set_log_level, show_log
from wingbeat.deployments.replica.engine.engine_calls import EngineCalls
from wingbeat.deployments.replica.engine.engine_loop import EngineLoop
from wingbeat.deployments.replica.engine.engine_messages import (
    NEEDS_ATTEMPTS,
    EngineStart,
    EngineStarted,
    ToEngine,
    ToReplica,
    portable,
)
from wingbeat.deployments.replica.engine.engine_setup import AskNeeds, DrafterTerms, EngineSetup
from wingbeat.deployments.replica.engine.factories import load_factory
from wingbeat.runtime.scheduling.request import RequestOutput
from wingbeat.runtime.verifier.checkpoints.digests import check_digest

if TYPE_CHECKING:
    from wingbeat.runtime.drafters.base import DrafterNeeds

START_S = 60.0
"""Maximum seconds to wait until the replica that started this process has sent `EngineStart`."""
LATE_S = 30.0
"""Seconds that the engine waits beyond the drafter's own time limit, so that the replica has time to report why the
drafter has not answered.
"""
SWITCH_INTERVAL_S = 0.5e-3
"""Seconds that another thread, such as one that compiles a grammar, may hold the interpreter before the engine's thread
gets it. Python's default is 5 ms, a third of the time of a round.
"""


def main() -> None:
    """Run one engine until the replica stops it or is gone, SIGTERM comes, or the engine breaks."""
    memory, own_bell, peer_bell, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    # SIGINT is ignored here. A terminal sends Ctrl-C to the replica too, and the replica decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    show_log()
    show_stacks()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    link = Link(memory, own_bell, peer_bell, is_parent=False)
    stopped = False
    try:
        stopped = serve(link)
    except Exception as error:
        traceback.print_exc()
        link.send((ToReplica.FAILED, portable(error)))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # A normal exit would wait for threads that still compile a grammar.
    os._exit(0 if stopped else 1)


def serve(link: Link) -> bool:
    """Load the engine and run it until it ends; returns True if the engine was stopped, False if it broke.

    Raises:
        Exception: the engine cannot be loaded; the message is one line that names what to change.
    """
    start: EngineStart = _expect(link, ToEngine.START, START_S)[0]
    config = start.config
    set_log_level(start.log_level)
    if start.gpus:
        claim_devices(start.gpus)
    # Objects made during loading live as long as the process, so traversing them for garbage would be wasted time.
    # Collection is therefore off during loading, and afterwards these objects are frozen, that is, later collections
    # skip them.
    gc.disable()
    setup, channel = _load(link, start)
    gc.freeze()
    gc.enable()
    name = None if channel is None else channel.name
    calls = EngineCalls(setup, config, start.engine_id, channel, start.weights)
    interval_s = config.stream_interval_ms / 1000

    def take_own(output: RequestOutput) -> None:
        for keeper in setup.keepers.values():
            keeper.take(output)

    loop = EngineLoop(setup.engine, link, calls, interval_s, setup.grammars, setup.cache_log, take_own)
    signal.signal(signal.SIGTERM, lambda number, frame: loop.stop())
    if start.core is not None:
        pin_thread(start.core)
    link.send(
        (
            ToReplica.STARTED,
            EngineStarted(setup.info, name, setup.check_drafter is not None, channel and channel.problem),
        )
    )
    try:
        return loop.run()
    finally:
        calls.close()
        if channel is not None:
            channel.verifier_end.close()


def _load(link: Link, start: EngineStart) -> tuple[EngineSetup, Any]:
    """Load the engine; returns its setup and the channel for its drafter (None if no drafter attaches)."""
    config = start.config

    def ask_needs(terms: DrafterTerms = DrafterTerms()) -> "DrafterNeeds":
        link.send((ToReplica.ASK_NEEDS, pickle.dumps(terms)))
        needs, problem = _expect(link, ToEngine.NEEDS, NEEDS_ATTEMPTS * config.drafter_start_timeout_s + LATE_S)
        if problem is not None:
            raise problem
        if needs is None:  # the drafter may not be running yet, so its needs are determined here
            from wingbeat.deployments.replica.engine.build import needs_loaded_here

            return needs_loaded_here(config, terms.convention)
        return pickle.loads(needs)

    build = load_factory(config.engine_factory) if config.engine_factory else partial(_build, spread=start.spread)
    setup = build(config, ask_needs if config.has_drafter() else _no_needs)
    if start.weights:
        check_digest(config.model_dir(), start.weights)
    if not config.has_drafter() or not (setup.channel_spec or config.drafts_in_engine()):
        return setup, None
    from wingbeat.deployments.replica.engine.pair_channel import open_channel, own_memory

    if config.drafts_in_engine():
        setup.take_drafter_in(own_memory(config))
        return setup, None

    return setup, open_channel(config, f"{start.engine_id}.{os.getpid()}", setup.channel_spec, start.address)


def _build(config: AppConfig, ask_needs: AskNeeds, spread: Any) -> EngineSetup:
    """Build Wingbeat's own engine. Torch is first imported here, so that torch's intra-op threads belong to the thread
    that runs this function.
    """
    import torch

    torch.set_num_threads(config.num_threads() or 1)
    # Denormal attention weights, as of sharp attention to few keys, slow a CPU down sevenfold.
    torch.set_flush_denormal(True)
    from wingbeat.deployments.replica.engine.build import build_setup

    return build_setup(config, ask_needs, spread)


def _no_needs(terms: DrafterTerms = DrafterTerms()) -> "DrafterNeeds":
    """Return the needs of an engine without drafter, which are empty."""
    from wingbeat.runtime.drafters.base import DrafterNeeds

    return DrafterNeeds()


def _expect(link: Link, kind: str, patience_s: float) -> list[Any]:
    """Wait for the replica's message of the given kind and return the message's elements. Used before rounds run. A
    stop message ends the process.

    Raises:
        RuntimeError: the message has not come within `patience_s`; the replica then starts another engine.
    """
    deadline = time.monotonic() + patience_s
    while True:
        for got, *rest in link.receive():
            if got == ToEngine.STOP:
                logging.shutdown()
                os._exit(0)
            if got == kind:
                return rest
        if (left_s := deadline - time.monotonic()) <= 0:
            raise RuntimeError(f"the replica has not sent '{kind}' within {patience_s:.0f} s")
        link.wait(left_s)


if __name__ == "__main__":
    main()
