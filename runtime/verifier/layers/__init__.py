"""transformers' layers adapted to paged KV: checks of a model, replaced attention and layers, hooks."""
