"""The rendering of a request's own chat template."""

render_apart = "wingbeat.runtime.own_template.render:render_apart"
