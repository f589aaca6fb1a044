"""Worker process that tries out whether grammars compile. Each trial runs in a forked process, which the kernel ends if
it exceeds the limits.

`GrammarTrial` starts this process with three arguments: the file descriptor of the control socket, and the CPU seconds
and bytes allowed for a compilation. Reads the vocabulary from standard input, and each grammar from a socket received
over the control socket.
"""

import contextlib
import json
import os
import pickle
import resource
import signal
import socket
import sys
from random import Random

import numpy as np

from wingbeat.runtime.grammar.compiler import compile_spec, lark_of_spec
from wingbeat.runtime.grammar.grammar_masker import GrammarMasker, RequestGrammar
from wingbeat.runtime.grammar.verdict import Verdict
from wingbeat.runtime.grammar.vocabulary import Vocabulary, vocabulary
from wingbeat.runtime.scheduling.request import GrammarSpec, RequestTooExpensive

MOST_WALL_S = 60
NUM_STEPS = 64
"""Number of tokens of a random walk through a grammar. The walk detects grammars whose cost per token grows with the
length of the text, before a request uses such a grammar.
"""
_NICENESS = 5
"""Niceness of the worker, so that trials yield the CPU to rounds."""
_BY_ITSELF = (signal.SIGXCPU, signal.SIGALRM, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
"""Signals that end a trial if the grammar exceeds the limits; all other signals have other causes."""
_ROOT = np.zeros(1, np.int64), np.full(1, -1, np.int64)


def main() -> None:
    """Forks a process for each socket that arrives, until the other end of the control socket is closed."""
    control = socket.socket(fileno=int(sys.argv[1]))
    cpu_s, memory_bytes = int(sys.argv[2]), int(sys.argv[3])
    tokens = vocabulary(*pickle.load(sys.stdin.buffer), lambda text: [])
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        _, (*fds,), _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        if os.fork() == 0:
            try:
                answer(socket.socket(fileno=fds[0]), tokens, cpu_s, memory_bytes)
            finally:
                os._exit(0)
        os.close(fds[0])
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue


def answer(peer: socket.socket, tokens: Vocabulary, cpu_s: int, memory_bytes: int) -> None:
    """Reads a grammar from a socket and writes the grammar's `Verdict`.

    If the trial ended for another reason than the grammar, nothing is written.
    """
    with peer.makefile("rb") as reader:
        spec = GrammarSpec(*json.loads(reader.read()))
    finder = os.fork()
    if finder == 0:
        try:
            limit(cpu_s, memory_bytes)
            peer.sendall(json.dumps(verdict_of(spec, tokens)).encode())
        except MemoryError:
            os.abort()
        finally:
            os._exit(0)
    _, status = os.waitpid(finder, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _BY_ITSELF:
        told = f"{spec.field} takes more than {cpu_s} s or {memory_bytes // 2**20} MiB to compile"
        peer.sendall(json.dumps(Verdict(told, "")).encode())


def limit(cpu_s: int, memory_bytes: int) -> None:
    """Limits this process's CPU time, wall time and additional memory; the kernel enforces the limits."""
    signal.setitimer(signal.ITIMER_REAL, MOST_WALL_S)
    with open("/proc/self/statm") as sizes:
        own_bytes = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def verdict_of(spec: GrammarSpec, tokens: Vocabulary) -> Verdict:
    """Verdict on a grammar, found by compiling it and following random texts."""
    try:
        lark = lark_of_spec(tokens, spec)
        grammar = compile_spec(tokens, spec, lark)
        for seed in range(3):
            _walk(grammar, Random(seed), again=seed == 0)
    except (ValueError, RequestTooExpensive) as error:
        return Verdict(str(error), "")
    return Verdict("", lark)


def _walk(grammar: RequestGrammar, rng: Random, again: bool) -> None:
    """Follows random allowed tokens.

    Args:
        again: whether to repeat the same token as long as it is allowed, because repetition increases the cost of
            ambiguous grammars.

    Raises:
        ValueError: the grammar matches no text.
        RequestTooExpensive: following the text takes too long.
    """
    masker, tokens = GrammarMasker(grammar), grammar.vocabulary
    masks, last = np.zeros((1, tokens.num_words), np.int32), -1
    for step in range(NUM_STEPS):
        masker.fill(*_ROOT, masks)
        if masker.problem is not None:
            raise masker.problem
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little"))
        if step == 0 and not len(allowed):
            raise ValueError(f"{grammar.spec.field} matches no text that the model's tokens can write")
        allowed = allowed[~np.isin(allowed, tokens.never)]
        if not len(allowed):
            return
        last = last if again and last in allowed else int(rng.choice(allowed))
        masker.accept(last)


if __name__ == "__main__":
    main()
