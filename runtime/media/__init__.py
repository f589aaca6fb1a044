"""Images and audio: from the processor's arrays to embeddings in the rows of a prompt."""
