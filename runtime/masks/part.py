"""Runtime part: masks of the tokens that a request allows; imports the implementation with the first engine."""

masker = "wingbeat.runtime.masks.bad_words:masker"
token_masks = "wingbeat.runtime.masks.allowed_tokens:TokenMasks"
