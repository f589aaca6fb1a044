"""`DrafterKind`, the descriptor with which each kind of drafter registers itself; does not import torch."""

from typing import NamedTuple


class DrafterSetting(NamedTuple):
    """A setting of one kind of drafter, under vLLM's name; if absent, the kind's default applies."""

    name: str
    number: type[int] | type[float]
    least: float
    most: float
    description: str


class DrafterKind(NamedTuple):
    """Descriptor of a kind of drafter. Functions are given as `module:function` and imported when called.

    Users select a kind by name, except kinds recognised by a folder's content and classes.
    """

    name: str
    build: str
    """Function (user's source, verifier description, tree shape, options) -> drafter."""
    folder: str | None = None
    """Description of the folder's content for error messages; empty if the kind is a special case of another kind."""
    claims: str | None = None
    """Function (config.json, tensor shapes) -> whether a folder holds this kind; None accepts any folder that no kind
    claims."""
    readings: str | None = None
    """For heads: function (folder, verifier, number of tokens that each convention must be able to draft) -> the
    `HeadConvention`s that the files allow, most likely first."""
    matches: str | None = None
    """For kinds with `readings`: function (head, tokens int64 [batch, length], taps [batch, length, taps_size], steps)
    -> bool [batch, N, steps]: whether the greedy draft of each step equals the text's token. None unrolls the head."""
    find_problem: str | None = None
    """For classes: function (import path) -> one line naming what is missing on this machine, or None."""
    modules: str | None = None
    """Function (tensor names of a verifier's checkpoint, its number of layers) -> tensor names of each draft module in
    it. The kind drafts with the verifier's own checkpoint, and `auto` selects it if there are such modules."""
    modules_title: str = ""
    """Name of these modules for users."""
    copies_text: bool = False
    """Whether the drafter copies earlier text and therefore ranks no candidates."""
    remembers: bool = False
    """Whether drafts may come from the texts of other requests."""
    settings: tuple[DrafterSetting, ...] = ()
    check_settings: str | None = None
    """Function (given settings by name) that raises ValueError if they contradict one another."""
    is_fallback: bool = False
    """Whether `auto` selects this kind if nothing better is available; it must draft for any model."""
