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

from xgrammar import GrammarCompiler, TokenizerInfo

from wingbeat.runtime.grammar.bounded_calls import BoundedCalls
from wingbeat.runtime.grammar.budget import DearGrammars, ParsingOfAll
from wingbeat.runtime.grammar.certain_text import TokenTable
from wingbeat.runtime.grammar.compiler import MOST_THREADS, RequestGrammar, compile_spec
from wingbeat.runtime.grammar.trial_walks import problem_of
from wingbeat.runtime.scheduling.request import GrammarSpec

MOST_WALL_S = 60.0
MOST_COMPILED_BYTES = 2**27
"""Of a grammar once it is compiled: it stays in the engine's memory."""
_NICENESS = 5
"""Rounds go before trials."""


def main() -> None:
    """Fork for each socket that arrives, until the other end is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    cpu_s, memory_bytes = int(sys.argv[2]), int(sys.argv[3])
    info = TokenizerInfo.deserialize_json(sys.stdin.buffer.read().decode())
    table = TokenTable(info.decoded_vocab, frozenset(info.stop_token_ids), lambda text: [])
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The kernel then reaps the forks.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        _, (*fds,), _, _ = socket.recv_fds(control, 1, 1)
        if not fds:
            return
        if os.fork() == 0:
            try:
                answer(socket.socket(fileno=fds[0]), info, table, cpu_s, memory_bytes)
            finally:
                os._exit(0)
        os.close(fds[0])


def answer(peer: socket.socket, info: TokenizerInfo, table: TokenTable, cpu_s: int, memory_bytes: int) -> None:
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
        compiled = compile_spec(GrammarCompiler(info, max_threads=MOST_THREADS, cache_enabled=False), spec)
        if compiled.memory_size_bytes > MOST_COMPILED_BYTES:
            raise ValueError(f"{spec.field} takes more than {MOST_COMPILED_BYTES // 2**20} MiB once it is compiled")
        grammar = RequestGrammar(
            compiled=compiled,
            table=table,
            vocab_size=info.vocab_size,
            spec=spec,
            calls=BoundedCalls(),
            parsing_of_all=ParsingOfAll(),
            dear=DearGrammars(),
        )
        problem = problem_of(grammar)
    except ValueError as error:
        problem = str(error)
    peer.sendall(json.dumps(problem).encode())


if __name__ == "__main__":
    main()
