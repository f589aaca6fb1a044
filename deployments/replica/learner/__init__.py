"""Learning from what is served: where it is kept, who trains, and who judges the versions of a head."""
