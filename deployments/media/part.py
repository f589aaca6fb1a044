"""Hooks for images and audio. Commands import this module too, so the other modules are imported only when they are
used.
"""

settings = "wingbeat.deployments.media.settings:SETTINGS"
ram_settings = ("max_media_memory_bytes",)
content_parts = "wingbeat.deployments.media.content:content_parts"
prompt_reader = "wingbeat.deployments.media.opening:prompt_reader"
needs_torch = "wingbeat.deployments.media.opening:needs_torch"
prompt_details = "wingbeat.deployments.media.opening:prompt_details"
share_spans = "wingbeat.deployments.media.shared:share_spans"
attach_spans = "wingbeat.deployments.media.shared:attach_spans"
families = "wingbeat.deployments.media.families:media_families"
