"""What a request's grammar may cost the engine that follows it."""

from collections import OrderedDict
from weakref import finalize

from wingbeat.runtime.scheduling.request import GrammarSpec

MOST_AT_ONCE_S = 0.1
"""CPU time that a request's masks may take beyond `MASK_S` a token."""
MASK_S = 1e-3
"""CPU time of a token's masks that a request may take for good: rounds of the batch wait for it."""
MOST_PARSING_S = 0.1
"""CPU time that a request's tokens may take beyond `PARSE_S` each. What a parser remembers of an ambiguous text grows
with it, by up to half a gigabyte a second."""
PARSE_S = 30e-6
MOST_PARSING_OF_ALL_S = 0.5
"""The same of all requests that run, beyond which those with a share of `MOST_SHARE_S` end."""
MOST_SHARE_S = 0.05
_NUM_REMEMBERED = 256


class ParsingOfAll:
    """CPU time that went into what the parsers of an engine's requests remember."""

    def __init__(self) -> None:
        self.held_s = 0.0

    def add(self, seconds: float) -> None:
        """More, or less where a request has ended."""
        self.held_s += seconds


class DearGrammars:
    """The last grammars of which a single step took too long: what is compiled of them must not be followed."""

    def __init__(self) -> None:
        self._specs: OrderedDict[GrammarSpec, None] = OrderedDict()

    def __contains__(self, spec: GrammarSpec) -> bool:
        return spec in self._specs

    def add(self, spec: GrammarSpec) -> None:
        """One more."""
        self._specs[spec] = None
        if len(self._specs) > _NUM_REMEMBERED:
            self._specs.popitem(last=False)


def too_dear(spec: GrammarSpec) -> str:
    """What its requests are told."""
    return f"{spec.field} takes more computing or memory for each token than it may"


class GrammarBudget:
    """One request's: what was spent, less what its tokens have earned.

    Args:
        parsing_of_all: of the engine; what this request holds of it is given back with this object.
    """

    def __init__(self, parsing_of_all: ParsingOfAll) -> None:
        self._masks_s = 0.0
        self._parsing_s = 0.0
        self._held = [0.0]
        self._of_all = parsing_of_all
        held = self._held
        finalize(self, lambda: parsing_of_all.add(-held[0]))

    def took_token(self) -> None:
        """A token was taken."""
        self._masks_s = max(0.0, self._masks_s - MASK_S)
        self._parsing_s = max(0.0, self._parsing_s - PARSE_S)

    def spend(self, masks_s: float, parsing_s: float = 0.0) -> None:
        """CPU time of masks, and of what the parser remembers."""
        self._masks_s += masks_s
        self._parsing_s += parsing_s
        self._held[0] += parsing_s
        self._of_all.add(parsing_s)

    @property
    def is_over(self) -> bool:
        """Whether the request has to end."""
        crowds_out = self._of_all.held_s > MOST_PARSING_OF_ALL_S and self._held[0] > MOST_SHARE_S
        return self._masks_s > MOST_AT_ONCE_S or self._parsing_s > MOST_PARSING_S or crowds_out
