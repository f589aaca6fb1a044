"""Tries out in another process whether the grammars of requests compile, because a compilation may never end and cannot
be cancelled.
"""

import json
import logging
import pickle
import socket
import subprocess
import threading
from collections import OrderedDict

from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.grammar.grammar_masker import RequestGrammar
from wingbeat.runtime.grammar.verdict import Verdict
from wingbeat.runtime.interpreter import module_command, module_environment
from wingbeat.runtime.scheduling.request import GrammarSpec

logger = logging.getLogger(__name__)

MOST_CPU_S = 3
"""CPU seconds allowed for a compilation."""
MOST_BYTES = 2**29
"""Bytes of memory allowed for a compilation."""
CHEAP_KINDS = ("json_object", "choice")
"""Kinds of grammars that are not tried out, because they compile in milliseconds at any length that a request may
have.
"""
_NUM_KNOWN = 512
_PATIENCE_S = 120.0
_MOST_TRIES = 12
"""Maximum number of worker processes that may end during one trial for reasons other than the grammar."""


class GrammarTrial:
    """Checks that grammars compile within limits. Several threads may use the same object.

    The trials run in a worker process. The process starts at the call of `warm` or at the first grammar, which takes
    seconds, and ends at the call of `close`.
    """

    def __init__(self, grammars: Grammars, cpu_s: int = MOST_CPU_S, memory_bytes: int = MOST_BYTES) -> None:
        self.grammars = grammars
        """The compiler of the engine's grammars."""
        self._limits = cpu_s, memory_bytes
        self._known: OrderedDict[GrammarSpec, Verdict] = OrderedDict()
        """Verdicts on the grammars that were checked latest."""
        self._lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        """Worker process that compiles; None before it starts."""
        self._control: socket.socket | None = None
        self._closed = False

    def check(self, spec: GrammarSpec) -> str | None:
        """Tries a grammar out unless it was checked before; returns its Lark, or None for kinds that are not tried out.

        Raises:
            ValueError: the grammar does not compile, or exceeds the limits; the message begins with the field's name.
            RuntimeError: the worker process ended `_MOST_TRIES` times.
        """
        if spec.kind in CHEAP_KINDS:
            return None
        with self._lock:
            verdict = self._known.get(spec)
        if verdict is None:
            verdict = self._try(spec)
            with self._lock:
                self._known[spec] = verdict
                if len(self._known) > _NUM_KNOWN:
                    self._known.popitem(last=False)
        if verdict.problem:
            raise ValueError(verdict.problem)
        return verdict.lark

    def compile(self, spec: GrammarSpec) -> RequestGrammar:
        """Checks a grammar with `check`, then compiles it in this process; raises the errors of `check` and of
        `Grammars.compile`.
        """
        return self.grammars.compile(spec, self.check(spec))

    def warm(self) -> None:
        """Starts the worker process if none runs, and loads in this process what the first grammar needs."""
        try:
            with self._lock:
                self._ensure_started()
        except (ValueError, OSError):
            if not self._closed:
                raise

    def close(self) -> None:
        """Kills the worker process, even while it starts."""
        self._closed = True
        process = self.process
        if process is not None:
            process.kill()
            process.wait()
            self._control.close()

    def _try(self, spec: GrammarSpec) -> Verdict:
        for _ in range(_MOST_TRIES):
            process = None
            try:
                mine, its = socket.socketpair()
                with mine:
                    mine.settimeout(_PATIENCE_S)
                    with its, self._lock:
                        process = self._ensure_started()
                        socket.send_fds(self._control, [b"g"], [its.fileno()])
                    mine.sendall(json.dumps(spec).encode())
                    mine.shutdown(socket.SHUT_WR)
                    with mine.makefile("rb") as reader:
                        told = reader.read()
            except OSError as error:
                logger.warning("The process that tries grammars out has ended: %s", error)
                if process is not None:
                    process.kill()
                    process.wait()
                continue
            # An empty answer means that something other than the grammar ended the worker, so the trial is repeated.
            if told:
                return Verdict(*json.loads(told))
        raise RuntimeError("grammars cannot be tried out: the worker process ends again and again")

    def _ensure_started(self) -> subprocess.Popen:
        """The worker process, restarted if it has died; the caller holds the lock."""
        if self._closed:
            raise ValueError("structured_outputs cannot be tried out: the engine is shutting down")
        if self.process is not None and self.process.poll() is not None:
            self._control.close()
            self.process = None
        if self.process is None:
            self._start()
        return self.process

    def _start(self) -> None:
        tokens = self.grammars.vocabulary()
        self._control, its = socket.socketpair()
        command = module_command("wingbeat.runtime.grammar.worker", its.fileno(), *self._limits)
        with its:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[its.fileno()], env=module_environment(), text=False
            )
        if self._closed:
            self.process.kill()
        with self.process.stdin as stdin:
            pickle.dump((list(tokens.texts), tokens.special, tokens.stop_token_ids), stdin)
