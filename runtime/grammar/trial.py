"""Grammars of callers are tried out in a process of their own: a compile can be endless, and cannot be cancelled."""

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
"""CPU time of a compile."""
MOST_BYTES = 2**29
"""Memory of a compile."""
CHEAP_KINDS = ("json_object", "choice")
"""They take milliseconds at any length that a request may have."""
_NUM_KNOWN = 512
_PATIENCE_S = 120.0
_MOST_TRIES = 12
"""Processes that may end under one grammar by no fault of the grammar's."""


class GrammarTrial:
    """Says of grammars whether they compile within limits; safe to share between threads.

    The process starts by `warm` or with the first grammar, which takes seconds; it ends with this object.
    """

    def __init__(self, grammars: Grammars, cpu_s: int = MOST_CPU_S, memory_bytes: int = MOST_BYTES) -> None:
        self.grammars = grammars
        """Those of the engine."""
        self._limits = cpu_s, memory_bytes
        self._known: OrderedDict[GrammarSpec, Verdict] = OrderedDict()
        """Of the last ones."""
        self._lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        """The one that compiles."""
        self._control: socket.socket | None = None
        self._closed = False

    def check(self, spec: GrammarSpec) -> str | None:
        """Try a grammar out, unless it is known; its Lark, or None where it is cheap to make and was not tried.

        Raises:
            ValueError: it does not compile, or takes more time or memory than it may; begins with the field's name.
            RuntimeError: the process ends again and again.
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
        """Try a grammar out and compile it; raises as `check` and `Grammars.compile`."""
        return self.grammars.compile(spec, self.check(spec))

    def warm(self) -> None:
        """Start the process, unless it runs, and make ready what the first grammar needs in this one."""
        try:
            with self._lock:
                self._ensure_started()
        except (ValueError, OSError):
            if not self._closed:
                raise

    def close(self) -> None:
        """End the process; one that is starting too, for which nobody waits."""
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
            # Without a word it was ended by others.
            if told:
                return Verdict(*json.loads(told))
        raise RuntimeError("grammars cannot be tried out: the process for it ends again and again")

    def _ensure_started(self) -> subprocess.Popen:
        """The process; another where it has died. The lock is held."""
        if self._closed:
            raise ValueError("structured_outputs cannot be tried out: the engine ends")
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
