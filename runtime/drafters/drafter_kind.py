"""`DrafterKind`, the descriptor with which each kind of drafter registers itself; does not import torch."""

from typing import NamedTuple


class DrafterSetting(NamedTuple):
    """A setting of one kind of drafter, under vLLM's name.

    If the user does not give the setting, the kind's default applies.
    """

    name: str
    number: type[int] | type[float]
    least: float
    most: float
    description: str


class DrafterKind(NamedTuple):
    """Descriptor of a kind of drafter. Functions are given as `module:function` and imported when called.

    Users select a kind by its name, by a folder whose content shows the kind, or by the import path of a class.
    """

    name: str
    build: str
    """Function (user's source, verifier description, tree shape, options) -> drafter."""
    folder: str | None = None
    """Description of the content of a folder of this kind, for error messages; empty if the kind is a special case of
    another kind. None for kinds without folders."""
    claims: str | None = None
    """Function (config.json, tensor shapes) -> whether a folder holds this kind. None accepts every folder that no
    other kind claims."""
    check: str | None = None
    """Function (folder, verifier description) that raises ValueError if the head was made for another verifier, before
    weights are loaded. If None, `readings` raises this error."""
    readings: str | None = None
    """Function, for heads: (folder, verifier, number of tokens that each convention must be able to draft) -> the
    `HeadConvention`s that the files allow, most likely first."""
    matches: str | None = None
    """For kinds with `readings`: function (head, tokens int64 [batch, length], taps [batch, length, taps_size], steps)
    -> bool [batch, N, steps]: whether the greedy draft at each step equals the token of the text. If None,
    `heads.unroll.matches` is called."""
    find_problem: str | None = None
    """Function, for classes: (import path) -> a line that names the missing module or package on this machine, or None.
    """
    modules: str | None = None
    """Function (tensor names of a verifier's checkpoint, number of the verifier's layers) -> tensor names of each draft
    module in the checkpoint. The kind drafts with modules of the verifier's own checkpoint, and `auto` selects the kind
    if such modules exist.
    """
    modules_title: str = ""
    """Name of these modules for users."""
    copies_text: bool = False
    """Whether the drafter copies earlier text and therefore ranks no candidates."""
    drafts_from_other_requests: bool = False
    """Whether drafts may come from the texts of other requests."""
    settings: tuple[DrafterSetting, ...] = ()
    check_settings: str | None = None
    """Function (given settings by name) that raises ValueError if settings contradict one another."""
    is_fallback: bool = False
    """Whether `auto` selects this kind if no better kind is available. Such a kind must draft for any model."""
