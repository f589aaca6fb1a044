"""From a schema, an expression or a list of choices to a grammar over the model's tokens, by xgrammar."""

import json
import os
import re
import threading
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from wingbeat.runtime.grammar.bounded_calls import BoundedCalls
from wingbeat.runtime.grammar.budget import DearGrammars, ParsingOfAll, too_dear
from wingbeat.runtime.grammar.certain_text import TokenTable
from wingbeat.runtime.grammar.schema_check import as_enforced, check_schema, plain_escapes
from wingbeat.runtime.scheduling.request import GrammarSpec

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarCompiler, TokenizerInfo

    from wingbeat.runtime.tokenizer import Tokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MOST_WHITESPACE = 16
"""Characters of whitespace between two pieces of JSON: without a bound a model may write nothing else."""
MOST_THREADS = min(4, os.cpu_count() or 1)
"""Of a trial; an engine compiles on one, beside its rounds."""
MOST_LIVE_BYTES = 2**29
"""Compiled grammars of the requests that run."""
_SCHEMAS_OF_TAGS = ("json_schema", "schema")
_CACHE_BYTES = 2**26
_MAX_REASON = 300
_SOURCE = re.compile(r"^\[[\d:]+\] \S+\.cc:\d+: (Check failed: \(.*?\) is false: )?")
"""Where in xgrammar's own source an error arose."""


class RequestGrammar(NamedTuple):
    """A compiled grammar, and what the requests of its engine share."""

    compiled: "CompiledGrammar"
    table: TokenTable
    vocab_size: int
    spec: GrammarSpec
    calls: BoundedCalls
    parsing_of_all: ParsingOfAll
    dear: DearGrammars


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
        self.calls = BoundedCalls()
        """In which masks are found."""
        self._parsing_of_all = ParsingOfAll()
        self._dear = DearGrammars()
        self._live: WeakValueDictionary[GrammarSpec, CompiledGrammar] = WeakValueDictionary()
        """Of requests that run, or are about to."""

    def compile(self, spec: GrammarSpec) -> RequestGrammar:
        """The grammar of a request.

        Raises:
            ValueError: it is none, xgrammar cannot serve it, or the model has no token to end an answer with; the
                message names the field and says why.
        """
        if not self._eos_token_ids:
            raise ValueError(f"{spec.field} cannot be used: the model names no token that ends a text")
        if spec in self._dear:
            raise ValueError(too_dear(spec))
        self.warm()
        compiled = self._live.get(spec)
        if compiled is None:
            compiled = compile_spec(self._compiler, spec)
            num_bytes = sum(other.memory_size_bytes for other in self._live.values())
            if num_bytes + compiled.memory_size_bytes > MOST_LIVE_BYTES:
                raise ValueError(f"{spec.field} finds no room beside the grammars of the requests that run")
            self._live[spec] = compiled
        return self.of(compiled, spec)

    def warm(self) -> None:
        """Import and make what the first grammar needs, which takes a second or more; from any thread."""
        with self._making:
            if self._compiler is None:
                from xgrammar import GrammarCompiler

                info = self.tokenizer_info
                self._compiler = GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)

    def of(self, compiled: "CompiledGrammar", spec: GrammarSpec) -> RequestGrammar:
        """A compiled grammar of this tokenizer, to be followed."""
        return RequestGrammar(
            compiled, self._table, self._vocab_size, spec, self.calls, self._parsing_of_all, self._dear
        )

    @cached_property
    def _table(self) -> TokenTable:
        def encode(text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False)

        return TokenTable(self.tokenizer_info.decoded_vocab, frozenset(self._eos_token_ids), encode)

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
        "json": lambda text: compiler.compile_json_schema(
            _enforced(text, spec.field), max_whitespace_cnt=MOST_WHITESPACE
        ),
        "json_object": lambda _: compiler.compile_json_schema(
            '{"type": "object"}', strict_mode=False, max_whitespace_cnt=MOST_WHITESPACE
        ),
        "regex": lambda text: compiler.compile_regex(plain_escapes(text)),
        "choice": lambda text: compiler.compile_grammar(_choice_grammar(text)),
        "grammar": compiler.compile_grammar,
        "structural_tag": lambda text: compiler.compile_structural_tag(_enforced_tag(text, spec.field)),
    }
    if spec.kind not in by_kind:
        raise ValueError(f"{spec.field} has no kind {spec.kind!r}: there are {', '.join(KINDS)}")
    try:
        return by_kind[spec.kind](spec.text)
    except _Refused as error:
        raise ValueError(str(error)) from None
    except (RuntimeError, ValueError) as error:
        # What a user wrote makes xgrammar raise these and classes of its own below them; anything else is our mistake.
        reason = _SOURCE.sub("", " ".join(str(error).split()))[:_MAX_REASON]
        raise ValueError(f"{spec.field} cannot be compiled: {reason}") from error


class _Refused(Exception):
    """The whole message is said."""


def _enforced(text: str, field: str) -> str:
    """A schema of which every keyword is enforced, written anew.

    Raises:
        _Refused: it is no JSON, or a keyword is not enforced.
    """
    return _written(_enforced_schema(_read(text, field), field))


def _enforced_tag(text: str, field: str) -> str:
    """A structural tag of whose schemas every keyword is enforced; raises as `_enforced`."""
    tag = _read(text, field)
    pending = [tag]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict):
            for name, value in part.items():
                if name in _SCHEMAS_OF_TAGS:
                    part[name] = _enforced_schema(value, field)
                elif name == "pattern" and isinstance(value, str):
                    part[name] = plain_escapes(value)
                else:
                    pending.append(value)
    return _written(tag)


def _enforced_schema(schema: Any, field: str) -> Any:
    try:
        check_schema(schema, field)
        return as_enforced(schema)
    except ValueError as error:
        raise _Refused(str(error)) from None
    except RecursionError:
        raise _Refused(f"{field} is nested too deeply") from None


def _read(text: str, field: str) -> Any:
    """JSON that a request brought as text.

    xgrammar's own reader stops behind the first value and takes the last of equal names: it is given what was read and
    checked here, and never the text.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise _Refused(f"{field} is nested too deeply") from None
    except ValueError as error:
        raise _Refused(f"{field} is no JSON: {error}") from None


def _written(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _choice_grammar(text: str) -> str:
    """EBNF of one of several texts, given as a JSON list."""
    choices = json.loads(text)
    return "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
