"""`wingbeat.LLM`: batches of prompts in this process, without Ray and HTTP."""
