"""Images and audio of requests: fetched from allowed hosts, decoded within limits, and prepared for the model."""
