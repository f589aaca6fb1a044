"""Anthropic's Messages API as a translation onto chat completions."""
