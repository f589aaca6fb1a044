"""What a model's text says beside its answer: thoughts and tool calls, found in text that arrives in pieces."""
