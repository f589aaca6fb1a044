"""A draft head that learns from what is served: who trains it, and who judges its versions."""
