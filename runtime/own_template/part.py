"""Registers the rendering of chat templates sent with requests."""

render_apart = "wingbeat.runtime.own_template.render:render_apart"
