"""Embeddings of prompts, which every model has; imports what it adds where it is asked for."""

feature = "wingbeat.runtime.pooling.pooled_rows:PromptPooling"
