"""Images and audio: from arrays that a processor made to embeddings in the rows of a prompt."""
