"""Runtime part: pairs for the drafter are kept back while no trees are requested; imported with the first drafter."""

deferral = "wingbeat.runtime.deferral.deferred_pairs:DeferredPairs"
