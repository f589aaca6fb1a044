"""Hooks of pushed weights. The implementation is given by its import path and not imported here, because commands
import this file.
"""

add_commands = "wingbeat.deployments.weights.command:add_commands"
add_routes = "wingbeat.deployments.weights.routes:add_weights_routes"
bodies = "wingbeat.deployments.weights.routes:BODIES"
families = "wingbeat.deployments.weights.families:weights_families"
operator_paths = "wingbeat.deployments.weights.routes:BODIES"
replica_engines = "wingbeat.deployments.weights.replica_weights:replica_weights"
