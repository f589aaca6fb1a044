"""Hooks of `/tokenize`, `/detokenize` and `/tokenizer_info`.

The routes are imported only when a server adds them, because commands import this module too.
"""

add_routes = "wingbeat.deployments.api.tokens.routes:add_token_routes"
bodies = "wingbeat.deployments.api.tokens.routes:BODIES"
