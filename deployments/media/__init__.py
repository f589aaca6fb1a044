"""Images and audio of requests: fetched where that is allowed, decoded within limits, made ready for the model."""
