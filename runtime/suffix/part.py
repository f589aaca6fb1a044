"""The drafter `suffix`, whose automaton holds the texts of all requests."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind, DrafterSetting

_BUILD = "wingbeat.runtime.suffix.suffix_drafter:build_suffix"
_SETTINGS = (
    DrafterSetting(
        "suffix_decoding_max_tree_depth",
        int,
        2,
        1 << 16,
        "With drafter suffix: maximum tokens of a matched context and the draft behind it together; by default "
        "contexts have at most 32 tokens and drafts draft_steps.",
    ),
    DrafterSetting(
        "suffix_decoding_max_cached_requests",
        int,
        0,
        1 << 31,
        "With drafter suffix: maximum requests whose outputs are kept to draft other requests from; the older half is "
        "dropped at a time, and 0 drafts each request from its own text only. By default, and at most, outputs of "
        "131,072 tokens are kept.",
    ),
    DrafterSetting(
        "suffix_decoding_max_spec_factor",
        float,
        0.0,
        1e6,
        "With drafter suffix: maximum drafted levels per token of the matched context; by default 4.",
    ),
    DrafterSetting(
        "suffix_decoding_min_token_prob",
        float,
        0.0,
        1.0,
        "With drafter suffix: minimum fraction of a context's occurrences that a drafted token, "
        "with the tokens before it in the draft, has followed; by default an estimate of at least 0.01.",
    ),
)
drafter_kinds = (DrafterKind("suffix", _BUILD, copies_text=True, remembers=True, settings=_SETTINGS),)
