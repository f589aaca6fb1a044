"""Images that requests name: fetched where that is allowed, decoded within limits, and made ready for the model."""
