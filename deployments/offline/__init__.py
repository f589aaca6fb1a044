"""Batches of prompts in this process, without Ray and HTTP: `wingbeat.LLM`."""
