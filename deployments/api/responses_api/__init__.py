"""OpenAI's Responses API, translated to chat completions; no state is kept between requests."""
