"""Interfaces of an engine's process: what an engine factory takes as arguments and returns."""

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
    """No drafter could be started; the message is one line that names the cause."""


class DrafterTerms(NamedTuple):
    """Settings that a verifier sends to its first drafter and to each replacement, with the request for the drafter's
    needs.
    """

    convention: "HeadConvention | None" = None
    """Convention by which the draft head is read; None if the head's files specify it."""
    loan: Any = None
    """Weights that the drafter borrows from a verifier on the same GPU, made by the hook `lend`; None if no weights are
    borrowed.
    """
    rows: Any = None
    """Where the drafter finds the verifier's embedding and output matrix after an update, made by the runtime's hook
    `rows_of`; None if the weights do not change.
    """


class AskNeeds(Protocol):
    """Function that requests the needs of a drafter which is starting in its own process."""

    def __call__(self, terms: DrafterTerms = DrafterTerms()) -> "DrafterNeeds":
        """Return the drafter's needs under these terms. The call blocks until the needs are known, and raises if the
        drafter cannot start.
        """
        ...


class ServedEngine(Protocol):
    """Interface of an engine as used by `EngineLoop` and `EngineCalls`, only in the thread that has loaded the engine.

    If a round fails and `step` can tell which requests may have caused the failure, `step` raises RoundFailed.
    """

    drafter_state: str
    """`none`, `attached`, `late` or `lost`."""
    tell_round: Callable[[int, list[str]], None]
    """Function that the loop sets. The engine calls the function before each round with the round's token count and
    request ids.
    """

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


class ServedGrammars(Protocol):
    """Compiles grammars of requests, on any thread, within limits of time and memory."""

    def warm(self) -> None:
        """Prepare the compiler for the first grammar, in parallel to the rounds."""
        ...

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar. Raises ValueError if that is impossible; its message is one line that begins with the
        field's name.
        """
        ...

    def close(self) -> None:
        """Release everything; called when the engine's loop ends."""
        ...


class Keeper(Protocol):
    """Holds named objects of one kind, such as prefixes, in an engine; called on the engine's thread only."""

    def open(self, variants: Iterable[Variant] = ()) -> Sequence[Any]:
        """Restore the objects that are on disk and return them; each object has attributes `name` and `version`.

        Args:
            variants: variants of the model that are served from the start.
        """
        ...

    def keep(self, entries: Iterable[tuple[str, int, Any]]) -> "Future[None] | None":
        """Bind names to objects. Each entry is name, version and object; with None as the object, the name is removed.
        The future completes once the objects are written to disk.
        """
        ...

    def take(self, output: RequestOutput) -> None:
        """Handle an output of a request that was made by the engine itself and not by a router."""
        ...

    def close(self) -> None:
        """Finish all files that are being written."""
        ...


class EngineSetup(NamedTuple):
    """Return value of an engine factory."""

    engine: ServedEngine
    info: ModelInfo
    channel_spec: "ChannelSpec | None"
    """Spec of the channel to the drafter; None if there is no drafter."""
    check_drafter: Callable[[Any], object] | None = None
    """Function called with the idle engine once the first drafter is attached; raises if the drafter is unfit."""
    cache_log: "CacheLog | None" = None
    """Log of changes of the prefix cache; None if routers get no reports about the prefix cache."""
    keepers: Mapping[str, Keeper] = MappingProxyType({})
    """For each kind of named object, its keeper."""
    take_drafter_in: "Callable[[ChannelFactory], None] | None" = None
    """Loads the drafter in this process and attaches it; None if the drafter always has its own process."""
    grammars: ServedGrammars | None = None
    """Compiler of grammars for the model; with None, requests with a grammar are refused."""
