"""Images and audio in prompts: converts the processor's arrays to embeddings of the prompt's rows."""
