"""Images and audio: from processed arrays to embeddings in the rows of a prompt."""
