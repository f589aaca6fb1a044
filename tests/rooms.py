"""The rooms of the project, and which of them each may import (`test_layering.py` holds it to that)."""

ROOMS_WITH_RAY = {"cluster.placement", "cluster.autoscaling", "cluster.gpus"}
DEEP = {"runtime.verifier"}
"""Rooms whose folders are rooms too."""

_TABLE = """
__init__: deployments.app deployments.offline
cluster.autoscaling:
cluster.channels: runtime.free_memory runtime.interpreter runtime.protocol
cluster.child_process: runtime.interpreter
cluster.cores:
cluster.engine_speed: cluster.routing
cluster.fork_server: cluster.channels cluster.child_process cluster.mps
cluster.gpus: cluster.nvml cluster.placement
cluster.memory_kills:
cluster.mps:
cluster.nvml:
cluster.placement:
cluster.process_tree: cluster.channels
cluster.routing: runtime.kv
deployments.api: deployments.fleet deployments.host_names deployments.limits deployments.media deployments.metrics
    deployments.parsing deployments.parts deployments.request_context runtime.head_versions runtime.lora runtime.media
    runtime.metrics runtime.prefixes runtime.scheduling runtime.text_stream runtime.tokenizer
deployments.app: cluster.autoscaling cluster.placement deployments.app_config deployments.door deployments.fleet
    deployments.gpu_shares deployments.log deployments.options deployments.ray_cluster deployments.replica
    deployments.router deployments.surface
deployments.app_config: cluster.placement deployments.options runtime.config runtime.hub runtime.refusals
deployments.cli: cluster.channels cluster.gpus deployments.app_config deployments.door deployments.gpu_shares
    deployments.launch deployments.log deployments.options deployments.parts deployments.start_up runtime.checks
    runtime.config runtime.config_fields runtime.drafters runtime.folder_kinds runtime.free_memory runtime.heads
    runtime.hub runtime.hugging_face runtime.kv runtime.llm runtime.metrics runtime.recordings runtime.scheduling
    runtime.tensor_files runtime.tensorrt runtime.text_stream runtime.tokenizer_file runtime.training
    runtime.verifier.checkpoints runtime.verifier.loading
deployments.doctor: cluster.channels cluster.gpus cluster.nvml deployments.cli kernels.comparison kernels.cpu
    kernels.disk_cache runtime.checks runtime.free_memory runtime.graphs runtime.scheduling
deployments.door:
deployments.fleet: cluster.routing deployments.handle_calls runtime.kv runtime.lora runtime.metrics runtime.prefixes
    runtime.scheduling
deployments.gpu_shares: cluster.gpus cluster.placement deployments.app_config deployments.options
deployments.handle_calls:
deployments.head_watch: cluster.channels
deployments.host_names:
deployments.http_server:
deployments.launch: cluster.channels cluster.process_tree deployments.app deployments.app_config deployments.door
    deployments.gpu_shares deployments.head_watch deployments.host_names deployments.ray_cluster deployments.replica
    deployments.start_up deployments.start_watch deployments.stop_signals deployments.watchdog runtime.tokenizer_file
deployments.learning_folder: deployments.app_config kernels.disk_cache runtime.head_versions runtime.heads
deployments.limits:
deployments.log: deployments.request_context
deployments.media: deployments.limits runtime.media runtime.scheduling
deployments.metrics: deployments.options deployments.request_context runtime.metrics runtime.scheduling
deployments.model_front: deployments.api deployments.app_config deployments.fleet deployments.learning_folder
    deployments.metrics deployments.options deployments.surface runtime.tokenizer runtime.verifier.checkpoints
deployments.offline: cluster.channels deployments.api deployments.cli deployments.options runtime.llm runtime.metrics
    runtime.scheduling runtime.text_stream runtime.tokenizer
deployments.options: deployments.host_names deployments.limits deployments.log runtime.config runtime.config_fields
    runtime.demo runtime.drafters runtime.folder_kinds runtime.hub runtime.lora runtime.refusals runtime.scheduling
    runtime.settings runtime.static_tree runtime.tensor_files runtime.tensor_parallel
deployments.page: deployments.api deployments.fleet
deployments.parsing: deployments.options
deployments.parts:
deployments.ray_cluster: cluster.process_tree deployments.replica
deployments.ray_llm: deployments.app deployments.app_config deployments.options
deployments.replica: cluster.autoscaling cluster.channels cluster.child_process cluster.cores cluster.engine_speed
    cluster.fork_server cluster.gpus cluster.memory_kills cluster.placement cluster.routing deployments.app_config
    deployments.fleet deployments.handle_calls deployments.learning_folder deployments.log deployments.metrics
    deployments.options kernels.disk_cache runtime.checks runtime.config runtime.drafters runtime.engine
    runtime.grammar runtime.head_counts runtime.head_versions runtime.heads runtime.inner_drafter runtime.interpreter
    runtime.kv runtime.lora runtime.pair runtime.prefixes runtime.protocol runtime.recordings runtime.scheduling
    runtime.successor runtime.tensor_parallel runtime.training runtime.verifier.layers runtime.verifier_errors
deployments.request_context:
deployments.router: deployments.api deployments.app_config deployments.door deployments.http_server deployments.log
    deployments.metrics deployments.model_front deployments.options deployments.replica deployments.surface
    runtime.torchless
deployments.start_up:
deployments.start_watch: deployments.replica
deployments.stop_signals:
deployments.surface: deployments.api deployments.app_config deployments.media deployments.parsing runtime.scheduling
    runtime.verifier.checkpoints
deployments.watchdog: cluster.channels cluster.process_tree runtime.interpreter
kernels.attention: kernels.choice kernels.tree
kernels.choice:
kernels.comparison: kernels.attention kernels.choice kernels.kv kernels.layer kernels.sampling kernels.state
    kernels.tree
kernels.cpu: kernels.disk_cache kernels.layer kernels.sampling
kernels.disk_cache: kernels.replaced_file
kernels.kv: kernels.choice
kernels.layer: kernels.choice kernels.kv
kernels.replaced_file:
kernels.sampling: kernels.choice
kernels.state: kernels.choice kernels.tree
kernels.tree: kernels.choice kernels.sampling
runtime.checks: kernels.choice kernels.comparison kernels.disk_cache runtime.config runtime.drafters runtime.engine
    runtime.heads runtime.metrics runtime.scheduling runtime.tokenizer runtime.verifier.checkpoints
    runtime.verifier.loading
runtime.config: runtime.refusals runtime.static_tree
runtime.config_fields: runtime.config_numbers
runtime.config_numbers:
runtime.demo:
runtime.device_clock:
runtime.drafters: kernels.cpu kernels.kv kernels.sampling kernels.tree runtime.config runtime.demo
    runtime.device_clock runtime.folder_kinds runtime.graphs runtime.head_versions runtime.heads runtime.hub
    runtime.hugging_face runtime.kv runtime.protocol runtime.round runtime.speculation runtime.static_tree
    runtime.tensor_files runtime.verifier runtime.verifier.layers runtime.verifier.loading runtime.verifier_errors
runtime.engine: kernels.attention kernels.cpu kernels.disk_cache runtime.config runtime.drafters
    runtime.generation_config runtime.grammar runtime.graphs runtime.kv runtime.memory_promises runtime.metrics
    runtime.protocol runtime.round runtime.scheduling runtime.speculation runtime.state runtime.verifier
    runtime.verifier.layers runtime.verifier.loading runtime.verifier_errors
runtime.file_lock:
runtime.folder_kinds:
runtime.fp8_devices:
runtime.free_memory: runtime.memory_promises
runtime.generation_config: runtime.config_numbers runtime.scheduling runtime.tensor_files runtime.tokenizer
runtime.grammar: runtime.interpreter runtime.scheduling runtime.tokenizer
runtime.graphs:
runtime.head_counts: kernels.replaced_file runtime.file_lock runtime.head_versions
runtime.head_versions: kernels.replaced_file runtime.file_lock
runtime.heads: kernels.cpu kernels.layer kernels.replaced_file runtime.config_numbers runtime.fp8_devices runtime.hub
    runtime.hugging_face runtime.kv runtime.round runtime.tensor_files runtime.verifier.checkpoints
    runtime.verifier.layers runtime.verifier_errors
runtime.hub: runtime.tensor_files
runtime.hugging_face: runtime.tensor_files
runtime.inner_drafter: runtime.drafters runtime.engine runtime.heads runtime.pair runtime.protocol
    runtime.verifier.layers
runtime.interpreter:
runtime.kv: kernels.kv runtime.config runtime.fp8_devices runtime.free_memory runtime.memory_promises
runtime.llm: runtime.config runtime.drafters runtime.engine runtime.graphs runtime.hub runtime.inner_drafter
    runtime.metrics runtime.pair runtime.scheduling runtime.tensor_files runtime.verifier.layers
runtime.lora:
runtime.media: runtime.device_clock runtime.hugging_face runtime.protocol runtime.round runtime.scheduling
runtime.memory_promises: runtime.file_lock
runtime.metrics:
runtime.own_template: runtime.interpreter
runtime.pair: runtime.checks runtime.config runtime.drafters runtime.engine runtime.generation_config runtime.grammar
    runtime.heads runtime.hugging_face runtime.refusals runtime.tensor_parallel runtime.tensorrt runtime.tokenizer
    runtime.verifier runtime.verifier.layers runtime.verifier.loading
runtime.prefixes: kernels.disk_cache kernels.replaced_file runtime.drafters runtime.engine runtime.kv runtime.lora
    runtime.scheduling runtime.state runtime.verifier.layers
runtime.protocol: runtime.config
runtime.recordings: kernels.sampling runtime.config runtime.demo runtime.file_lock runtime.folder_kinds runtime.heads
    runtime.hub runtime.hugging_face runtime.protocol runtime.round runtime.scheduling runtime.settings
    runtime.tokenizer runtime.verifier runtime.verifier.layers
runtime.refusals:
runtime.round: kernels.cpu kernels.sampling kernels.tree runtime.config runtime.device_clock runtime.graphs runtime.kv
    runtime.protocol runtime.scheduling runtime.speculation
runtime.scheduling: runtime.config runtime.kv runtime.lora runtime.metrics
runtime.settings:
runtime.speculation: runtime.config
runtime.state: kernels.state runtime.config runtime.kv runtime.protocol runtime.refusals runtime.round
    runtime.scheduling runtime.verifier_errors
runtime.static_tree:
runtime.successor: runtime.prefixes runtime.tensor_files runtime.verifier.checkpoints
runtime.tensor_files: runtime.config_fields runtime.folder_kinds
runtime.tensor_parallel: kernels.layer runtime.config runtime.hugging_face runtime.kv runtime.lora runtime.refusals
    runtime.round runtime.verifier runtime.verifier.checkpoints runtime.verifier.layers runtime.verifier.loading
    runtime.verifier_errors
runtime.tensorrt: kernels.attention kernels.kv kernels.layer kernels.tree runtime.checks runtime.config
    runtime.drafters runtime.graphs runtime.heads runtime.hugging_face runtime.kv runtime.lora runtime.media
    runtime.protocol runtime.refusals runtime.round runtime.scheduling runtime.tensor_files runtime.tokenizer
    runtime.verifier runtime.verifier.layers runtime.verifier.loading runtime.verifier_errors
runtime.text_stream: runtime.scheduling runtime.tokenizer
runtime.token_length:
runtime.tokenizer: runtime.folder_kinds runtime.hugging_face runtime.own_template runtime.tensor_files
    runtime.token_length runtime.tokenizer_file
runtime.tokenizer_file: runtime.folder_kinds runtime.tensor_files
runtime.torchless:
runtime.training: kernels.replaced_file runtime.config runtime.drafters runtime.head_versions runtime.heads
    runtime.hub runtime.hugging_face runtime.llm runtime.metrics runtime.protocol runtime.recordings
    runtime.scheduling runtime.settings runtime.tensor_files runtime.tokenizer runtime.verifier.loading
runtime.verifier: kernels.cpu runtime.config runtime.graphs runtime.kv runtime.round runtime.verifier.layers
runtime.verifier.checkpoints: runtime.config_numbers runtime.folder_kinds runtime.hugging_face runtime.tensor_files
runtime.verifier.layers: kernels.attention kernels.cpu kernels.kv kernels.layer runtime.kv runtime.lora runtime.media
    runtime.round runtime.scheduling runtime.state runtime.verifier_errors
runtime.verifier.loading: kernels.cpu kernels.disk_cache runtime.config runtime.hugging_face runtime.kv runtime.media
    runtime.protocol runtime.refusals runtime.round runtime.scheduling runtime.state runtime.tensor_files
    runtime.tokenizer runtime.verifier runtime.verifier.checkpoints runtime.verifier.layers runtime.verifier_errors
runtime.verifier_errors:
"""
"""Room: rooms it may import, below it all. The serving path imports neither training nor recordings; the two windows
are `deployments.replica.engine.live_recording` and `deployments.replica.learner.learner_process`, a process of its own,
which settings open."""

_ROWS = (row.partition(":") for row in _TABLE.replace("\n    ", " ").splitlines() if row)
MAY_IMPORT = {room: set(others.split()) for room, _, others in _ROWS}
