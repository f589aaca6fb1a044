"""From a schema, an expression or a list of choices to a grammar over the model's tokens, by xgrammar."""

import json
import os
import re
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from wingbeat.runtime.scheduling.request import GrammarSpec

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

    from wingbeat.runtime.tokenizer import Tokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MOST_WHITESPACE = 16
"""Characters of whitespace between two pieces of JSON: without a bound a model may write nothing else."""
MOST_THREADS = min(4, os.cpu_count() or 1)
_CACHE_BYTES = 2**28
_MAX_REASON = 300
_SOURCE = re.compile(r"^\[[\d:]+\] \S+\.cc:\d+: (Check failed: \(.*?\) is false: )?")
"""Where in xgrammar's own source an error arose."""


class RequestGrammar(NamedTuple):
    """A compiled grammar, and how its text becomes tokens."""

    compiled: "CompiledGrammar"
    encode: Callable[[str], list[int]]


class Grammars:
    """Compiles grammars for one tokenizer; those of the last requests are kept. Safe to share between threads.

    Args:
        vocab_size: of the model's logits; ids that the tokenizer does not have are never allowed.
        eos_token_ids: what ends an answer once its grammar is complete.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._compiler: GrammarCompiler | None = None
        self._making = threading.Lock()

    def compile(self, spec: GrammarSpec) -> RequestGrammar:
        """The grammar of a request.

        Raises:
            ValueError: it is none, xgrammar cannot serve it, or the model has no token to end an answer with; the
                message names the field and says why.
        """
        if not self._eos_token_ids:
            raise ValueError(f"{spec.field} cannot be used: the model names no token that ends a text")
        with self._making:
            if self._compiler is None:
                from xgrammar import GrammarCompiler

                info = self.tokenizer_info
                self._compiler = GrammarCompiler(info, max_threads=MOST_THREADS, cache_limit_bytes=_CACHE_BYTES)
        return RequestGrammar(compile_spec(self._compiler, spec), self._encode)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def tokenizer_info(self) -> "TokenizerInfo":
        """The tokens, as xgrammar knows them."""
        # The import takes a second or more, and most servers never need it.
        from xgrammar import TokenizerInfo

        return TokenizerInfo.from_huggingface(
            self._tokenizer.hugging_face, vocab_size=self._vocab_size, stop_token_ids=self._eos_token_ids
        )


def compile_spec(compiler: "GrammarCompiler", spec: GrammarSpec) -> "CompiledGrammar":
    """The grammar of a request; raises as `Grammars.compile`."""
    by_kind: dict[str, Callable[[str], CompiledGrammar]] = {
        "json": lambda text: compiler.compile_json_schema(text, max_whitespace_cnt=MOST_WHITESPACE),
        "json_object": lambda _: compiler.compile_json_schema(
            '{"type": "object"}', strict_mode=False, max_whitespace_cnt=MOST_WHITESPACE
        ),
        "regex": compiler.compile_regex,
        "choice": lambda text: compiler.compile_grammar(_choice_grammar(text)),
        "grammar": compiler.compile_grammar,
        "structural_tag": compiler.compile_structural_tag,
    }
    if spec.kind not in by_kind:
        raise ValueError(f"{spec.field} has no kind {spec.kind!r}: there are {', '.join(KINDS)}")
    try:
        return by_kind[spec.kind](spec.text)
    except Exception as error:
        # xgrammar raises RuntimeError and its own classes for whatever a user wrote.
        reason = _SOURCE.sub("", " ".join(str(error).split()))[:_MAX_REASON]
        raise ValueError(f"{spec.field} cannot be compiled: {reason}") from error


def _choice_grammar(text: str) -> str:
    """EBNF of one of several texts, given as a JSON list."""
    choices = json.loads(text)
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
