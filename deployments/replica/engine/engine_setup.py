"""What the engine's process is made of: an engine from some factory, and what is asked of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.runtime.scheduling.maskers import CompiledGrammar
from wingbeat.runtime.scheduling.request import GrammarSpec, Request, RequestOutput, Variant

if TYPE_CHECKING:
    from concurrent.futures import Future

    from wingbeat.runtime.drafters.base import DrafterNeeds
    from wingbeat.runtime.heads.contract import HeadConvention
    from wingbeat.runtime.inner_drafter import ChannelFactory
    from wingbeat.runtime.kv.block_hashes import CacheLog
    from wingbeat.runtime.protocol.ends import VerifierEnd
    from wingbeat.runtime.protocol.messages import ChannelSpec


class DrafterStartError(RuntimeError):
    """No drafter could be started; one line naming the cause."""


class DrafterTerms(NamedTuple):
    """What a verifier tells its drafter before it is asked for its needs, and each of its successors."""

    convention: "HeadConvention | None" = None
    """How its head is to be read; None where its files say that."""
    loan: Any = None
    """Weights of the verifier on the GPU that both share, as a part lends them; None where it lends none."""


class AskNeeds(Protocol):
    """The way to a drafter that is starting in a process of its own."""

    def __call__(self, terms: DrafterTerms = DrafterTerms()) -> "DrafterNeeds":
        """What it needs of the verifier, told this; blocks until it knows, raises if it cannot start."""
        ...


class ServedEngine(Protocol):
    """What the loop and its calls need of an engine; all calls come from one thread, which has also loaded it.

    `step` raises RoundFailed where it knows which requests may have broken the engine.
    """

    drafter_state: str
    """`none`, `attached`, `late` or `lost`."""
    tell_round: Callable[[int, list[str]], None]
    """Set by the loop, called by the engine before each round: the round's tokens, and the ids of its requests."""

    def add_request(self, request: Request, grammar: CompiledGrammar | None = None) -> None: ...
    def abort_request(self, request_id: str) -> None: ...
    def is_waiting(self, request_id: str) -> bool: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def stats(self) -> Any: ...
    def check_integrity(self) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def attach_drafter(self, end: "VerifierEnd") -> None: ...
    def detach_drafter(self) -> None: ...
    def look_for_late_drafter(self) -> None: ...


def own_engine(engine: Any) -> Any:
    """Engine that a part may have put another one around."""
    return getattr(engine, "inner", engine)


class ServedGrammars(Protocol):
    """Compiles what requests give as their grammar, on any thread; what that takes is bounded."""

    def warm(self) -> None:
        """Make ready what the first grammar needs, beside the rounds."""
        ...

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Raises ValueError, one line that begins with the field's name, where that cannot be."""
        ...

    def close(self) -> None:
        """End with the engine's loop."""
        ...


class Keeper(Protocol):
    """Keeps in an engine what names of one kind stand for; all calls come from the engine's thread."""

    def open(self, variants: Iterable[Variant] = ()) -> Sequence[Any]:
        """Keep what is on disk; returns it: things with `name` and `version`.

        Args:
            variants: that are served from the start.
        """
        ...

    def keep(self, entries: Iterable[tuple[str, int, Any]]) -> "Future[None] | None":
        """Let names stand for things, None for no longer; ends once what is there has been written."""
        ...

    def take(self, output: RequestOutput) -> None:
        """Output of a request that came from no router."""
        ...

    def close(self) -> None:
        """Finish what is being written."""
        ...


class EngineSetup(NamedTuple):
    """What an engine factory returns."""

    engine: ServedEngine
    info: ModelInfo
    channel_spec: "ChannelSpec | None"
    """Of the channel its drafter attaches to; None where there is no drafter."""
    check_drafter: Callable[[Any], object] | None = None
    """Called with the idle engine once the first drafter is attached; raises where it is unfit."""
    cache_log: "CacheLog | None" = None
    """Of its prefix cache; None where routers are told nothing of it."""
    keepers: Mapping[str, Keeper] = MappingProxyType({})
    """By kind of names: what keeps in the engine what these stand for."""
    take_drafter_in: "Callable[[ChannelFactory], None] | None" = None
    """Loads the drafter in this process and attaches it; None where it always has a process of its own."""
    grammars: ServedGrammars | None = None
    """Compiler of its model's grammars; None serves no request with a grammar."""
