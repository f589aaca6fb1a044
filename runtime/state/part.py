"""Runtime part for layers with recurrent states; imports the implementation only for such models."""

check_limits = "wingbeat.runtime.state.settings:check_limits"
engine_settings = "wingbeat.runtime.state.settings:ENGINE_SETTINGS"
refusals = "wingbeat.runtime.state.settings:REFUSED"
remembered = "wingbeat.runtime.state.mixer_search:remembered_states"
