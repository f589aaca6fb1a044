"""Runtime part: embeddings of prompts, available for every model."""

feature = "wingbeat.runtime.pooling.pooled_rows:PromptPooling"
