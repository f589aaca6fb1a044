"""The verifier model: loading, checking and running it on its device."""
