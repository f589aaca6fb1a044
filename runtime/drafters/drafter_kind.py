"""Row of a kind of drafter in the table of kinds; loads no torch."""

from typing import NamedTuple


class DrafterSetting(NamedTuple):
    """A setting of one kind of drafter, by vLLM's name; not given, the kind is as it is best."""

    name: str
    number: type[int] | type[float]
    least: float
    most: float
    description: str


class DrafterKind(NamedTuple):
    """A kind of drafter. Functions are paths, `module:function`, imported where they are called.

    Users name a kind by its name, unless it is a folder's content or a class.
    """

    name: str
    build: str
    """The function (what the user gave, verifier, shape of the trees, options) -> drafter."""
    folder: str | None = None
    """A folder's content, as errors list it; empty for a special case of another kind's."""
    claims: str | None = None
    """The function (config.json, shapes of tensors) -> whether a folder holds this kind; None takes what is left."""
    readings: str | None = None
    """For heads, the function (folder, verifier, tokens that each reading must draft) -> the `HeadConvention`s that the
    files leave open, the likeliest first."""
    matches: str | None = None
    """For these, the function (head, tokens int64 [batch, length], taps [batch, length, taps_size], steps) -> bool
    [batch, N, steps]: whether the greedy draft of each step is the text's token."""
    find_problem: str | None = None
    """For a class, the function (its import path) -> one line about what is missing on this machine, or None."""
    modules: str | None = None
    """The function (names of a verifier's tensors, its layers) -> names of tensors in each drafting module among them:
    the kind then drafts by the verifier's own checkpoint, and `auto` is this kind where there are modules."""
    modules_title: str = ""
    """Name of these modules, for people."""
    copies_text: bool = False
    """Whether it continues earlier text, and so ranks no candidates."""
    remembers: bool = False
    """Whether its drafts may come from other requests' texts."""
    settings: tuple[DrafterSetting, ...] = ()
    check_settings: str | None = None
    """The function (settings that are given, by name), which raises ValueError where they contradict one another."""
    is_fallback: bool = False
    """Whether `auto` is this kind where nothing better is known; it drafts for any model."""
