"""The drafter `suffix`, whose automaton holds the texts of all requests."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind, DrafterSetting

_BUILD = "wingbeat.runtime.suffix.suffix_drafter:build_suffix"
_SETTINGS = (
    DrafterSetting(
        "suffix_decoding_max_tree_depth",
        int,
        2,
        1 << 16,
        "With drafter suffix: most tokens of a context that matched and of the draft behind it, together; by default "
        "contexts have at most 32, and drafts draft_steps.",
    ),
    DrafterSetting(
        "suffix_decoding_max_cached_requests",
        int,
        0,
        1 << 31,
        "With drafter suffix: requests whose outputs others are drafted from, the oldest forgotten first; 0 has each "
        "request drafted from its own text alone. By default as many as 131,072 tokens have.",
    ),
    DrafterSetting(
        "suffix_decoding_max_spec_factor",
        float,
        0.0,
        1e6,
        "With drafter suffix: most drafted levels for each token of the context that matched; by default 4.",
    ),
    DrafterSetting(
        "suffix_decoding_min_token_prob",
        float,
        0.0,
        1.0,
        "With drafter suffix: least share of a context's occurrences that a token followed, along with those before it "
        "in the draft; by default an estimate of at least 0.01.",
    ),
)
drafter_kinds = (DrafterKind("suffix", _BUILD, copies_text=True, remembers=True, settings=_SETTINGS),)
