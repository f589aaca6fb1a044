"""The process that tries grammars out: each in a fork of its own, which the kernel ends at its limits.

Started by `GrammarTrial` with the number of its control socket, the seconds and the bytes that a compile may take; the
tokens come on the standard input, and each grammar over a socket that comes over the control socket.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
from random import Random

import numpy as np
from xgrammar import CompiledGrammar, GrammarCompiler, GrammarMatcher, TokenizerInfo

from wingbeat.runtime.grammar.compiler import MOST_THREADS, compile_spec
from wingbeat.runtime.scheduling.request import GrammarSpec

MOST_WALL_S = 60.0
MOST_MASK_S = 0.1
"""CPU time of one mask: every round of the batch waits for it."""
_NUM_STEPS = 8
"""Tokens after which a mask is timed."""


def main() -> None:
    """Fork for each socket that arrives, until the other end is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    cpu_s, memory_bytes = int(sys.argv[2]), int(sys.argv[3])
    info = TokenizerInfo.deserialize_json(sys.stdin.buffer.read().decode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel then reaps the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, (*fds,), _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        if os.fork() == 0:
            try:
                answer(socket.socket(fileno=fds[0]), info, cpu_s, memory_bytes)
            finally:
                os._exit(0)
        os.close(fds[0])


def answer(peer: socket.socket, info: TokenizerInfo, cpu_s: int, memory_bytes: int) -> None:
    """Read a grammar and write what is wrong with it; ended before that by its limits."""
    with peer.makefile("rb") as reader:
        spec = GrammarSpec(*json.loads(reader.read()))
    signal.setitimer(signal.ITIMER_REAL, MOST_WALL_S)
    with open("/proc/self/statm") as sizes:
        own_bytes = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (own_bytes + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        grammar = compile_spec(GrammarCompiler(info, max_threads=MOST_THREADS, cache_enabled=False), spec)
        problem = "" if slowest_mask_s(grammar) <= MOST_MASK_S else f"{spec.field} takes too long at each token"
    except ValueError as error:
        problem = str(error)
    peer.sendall(json.dumps(problem).encode())


def slowest_mask_s(grammar: CompiledGrammar) -> float:
    """CPU seconds of the slowest mask on a short walk through a grammar."""
    matcher, rng = GrammarMatcher(grammar), Random(0)
    mask = np.zeros((1, -(-grammar.tokenizer_info.vocab_size // 32)), np.int32)
    slowest = 0.0
    for _ in range(_NUM_STEPS):
        start = time.process_time()
        matcher.fill_next_token_bitmask(mask, 0)
        slowest = max(slowest, time.process_time() - start)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if not allowed or not matcher.accept_token(rng.choice(allowed)) or matcher.is_terminated():
            break
    return slowest


if __name__ == "__main__":
    main()
