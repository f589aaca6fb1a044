"""Compiles schemas, regular expressions and other kinds of grammars for the model's tokens, with llguidance."""

import re
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wingbeat.runtime.grammar.ebnf import rules_of
from wingbeat.runtime.grammar.forms import HEADER, Either, Rule, json_of, lark_of, pattern, text
from wingbeat.runtime.grammar.grammar_masker import RequestGrammar
from wingbeat.runtime.grammar.schema_check import enforced, read_json
from wingbeat.runtime.grammar.structural_tags import StructuralTag
from wingbeat.runtime.grammar.vocabulary import Vocabulary, vocabulary_of
from wingbeat.runtime.scheduling.request import GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from wingbeat.runtime.tokenizer import Tokenizer

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MOST_ITEMS = 10_000
"""Maximum number of parser items while one mask is computed."""
MOST_SETS = 4
"""Maximum number of intersections and negations in a Lark grammar. The limit exists because the size of the automaton
of an intersection is the product of its operands' sizes.
"""
_MAX_REASON = 300
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:)")
_SOURCE = re.compile(r"(?m)^(at )?\d+\(\d+\): |^ *\d+ \|.*\n?|^ *\^\n?")
"""Matches source positions and excerpts of the generated Lark in llguidance's error messages. The matches are removed
from messages, because users did not write this Lark.
"""


class Grammars:
    """Compiler of grammars for one tokenizer. Several threads may use the same object.

    Args:
        vocab_size: size of the model's logits; ids that the tokenizer lacks are never allowed.
        eos_token_ids: tokens that end an answer once its grammar is complete.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._making = threading.Lock()

    def compile(self, spec: GrammarSpec, lark: str | None = None) -> RequestGrammar:
        """Compiles a request's grammar.

        Args:
            lark: result of `lark_of_spec` for this grammar, if available. A thread in an engine's process should pass
                it, because writing Lark holds Python's global interpreter lock for long, whereas compiling releases
                that lock.

        Raises:
            ValueError: the text is not a valid grammar, the grammar is not supported, or the model has no token that
                ends an answer; the message names the field and the reason.
        """
        if not self._eos_token_ids:
            raise ValueError(f"{spec.field} cannot be used: the model names no token that ends a text")
        return compile_spec(self.vocabulary(), spec, lark)

    def vocabulary(self) -> Vocabulary:
        """The tokenizer's tokens, read on first use, which takes a second or more; may be called from any thread."""
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = vocabulary_of(self._tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


def grammars(tokenizer: "Tokenizer | None", vocab_size: int, eos_token_ids: frozenset[int]) -> Grammars | None:
    """Returns the compiler of grammars for a model; None without a tokenizer."""
    return None if tokenizer is None else Grammars(tokenizer, vocab_size, eos_token_ids)


def lark_of_spec(vocabulary: Vocabulary, spec: GrammarSpec) -> str:
    """A request's grammar in llguidance's Lark dialect; raises the errors of `Grammars.compile`."""
    make = _LARK_OF.get(spec.kind)
    if make is None:
        raise ValueError(f"{spec.field} has no kind {spec.kind!r}: there are {', '.join(KINDS)}")
    try:
        return make(spec, vocabulary)
    except RecursionError:
        raise ValueError(f"{spec.field} is nested too deeply") from None


def compile_spec(vocabulary: Vocabulary, spec: GrammarSpec, lark: str | None = None) -> RequestGrammar:
    """Compiles a request's grammar; arguments and errors as for `Grammars.compile`."""
    lark = lark_of_spec(vocabulary, spec) if lark is None else lark
    try:
        return RequestGrammar(_compiled(lark, vocabulary, spec.field), vocabulary, spec)
    except ValueError:
        if spec.kind == "structural_tag":
            # The schemas are compiled one by one, so that the message names the schema that fails.
            for place, schema in _tag(spec, vocabulary).schemas:
                _compiled(lark_of(json_of(schema)), vocabulary, place)
        raise


def _compiled(lark: str, vocabulary: Vocabulary, field: str) -> "LLMatcher":
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(step_max_items=MOST_ITEMS, verbose_errors=False)
    made = LLMatcher(vocabulary.tokens, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)
    if made.is_error():
        reason = " ".join(_SOURCE.sub("", made.get_error().removesuffix("<non-verbose/>")).split())
        raise ValueError(f"{field} cannot be compiled: {reason[:_MAX_REASON]}")
    return made


def _tag(spec: GrammarSpec, vocabulary: Vocabulary) -> StructuralTag:
    return StructuralTag(read_json(spec.text, spec.field), vocabulary.special, vocabulary.never, spec.field)


def _of_tag(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    tag = _tag(spec, vocabulary)
    return lark_of(tag.form, tag.rules)


def _of_grammar(spec: GrammarSpec, _: Any) -> str:
    if not _LARK.search(spec.text):
        try:
            return lark_of(Rule("root"), rules_of(spec.text))
        except ValueError as error:
            raise ValueError(f"{spec.field} cannot be compiled: {error}") from None
    if len(re.findall("[&~]", spec.text)) > MOST_SETS:
        raise ValueError(f"{spec.field} has more than {MOST_SETS} of '&' and '~'")
    return f"{HEADER}\n{spec.text}"


_LARK_OF: dict[str, Callable[[GrammarSpec, Vocabulary], str]] = {
    "json": lambda spec, _: lark_of(json_of(enforced(read_json(spec.text, spec.field), spec.field))),
    "json_object": lambda *_: lark_of(json_of({"type": "object"})),
    "regex": lambda spec, _: lark_of(pattern(spec.text)),
    "choice": lambda spec, _: lark_of(Either([text(one) for one in read_json(spec.text, spec.field)])),
    "grammar": _of_grammar,
    "structural_tag": _of_tag,
}
