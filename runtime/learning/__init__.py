"""Training a draft head on what it is served with, and telling whether that has made it better."""
