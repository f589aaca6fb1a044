"""Registers the drafter `suffix`, which copies continuations from the texts of all requests."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind, DrafterSetting

_BUILD = "wingbeat.runtime.suffix.suffix_drafter:build_suffix"
_SETTINGS = (
    DrafterSetting(
        "suffix_decoding_max_tree_depth",
        int,
        2,
        1 << 16,
        "With drafter suffix: maximum total of matched context tokens and drafted tokens; by default contexts are "
        "limited to 32 and drafts to draft_steps tokens.",
    ),
    DrafterSetting(
        "suffix_decoding_max_cached_requests",
        int,
        0,
        1 << 31,
        "With drafter suffix: number of recent requests whose outputs are remembered as a source of drafts; 0 drafts "
        "each request from its own text only. By default outputs of 131,072 tokens in total are remembered.",
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
        "With drafter suffix: minimum share of the context's occurrences that were followed by the drafted path; by "
        "default an estimated path probability of at least 0.01.",
    ),
)
drafter_kinds = (DrafterKind("suffix", _BUILD, copies_text=True, drafts_from_other_requests=True, settings=_SETTINGS),)
