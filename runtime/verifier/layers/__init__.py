"""transformers' layers over paged KV: what is replaced, what is hooked, and what is found out about a model."""
