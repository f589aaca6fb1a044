"""Registers the sampling rules of requests, which verifiers publish and drafters apply."""

draft_rules = "wingbeat.runtime.draft_rules.draft_rules:DraftRules"
published_rules = "wingbeat.runtime.draft_rules.published_rules:PublishedRules"
