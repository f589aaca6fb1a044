"""Optional parts of the application. A part is a folder that can be deleted; no file outside the folder names it.

A part's module `part` defines any of the hooks listed below, as values, functions or import paths, and must be cheap to
import. `python -m tests.without NAME` removes a part. `config` is an `AppConfig`. Hooks that make something return None
if the settings do not ask for it.

Settings:

- `settings`: fields of `AppConfig` by name, in the form of `pydantic.create_model`; `json_schema_extra` may have the
  key `panel` with the title of the help's group, from `options.panel_titles`.
- `model_settings`: like `settings`, for `ModelOptions`, which commands without a server have too.
- `check_settings(config)`: raises ValueError, one line, for contradictions between fields.
- `check_before_start(config)`: raises ValueError, one line, for what this machine lacks, before anything is deployed.
- `check_start(config, host, port, address, here)`: raises ValueError or OSError, one line, for a start that cannot
  succeed; `here` is whether the whole application runs on this machine.
- `check_in_cluster(config)`: raises ValueError, one line, if the nodes of the Ray cluster cannot hold the application.
- `check_memory(config, file)`: raises ValueError, one line, if this machine has too little memory; called only if the
  whole application runs on this machine.
- `log_filter(write)`: a filter of Wingbeat's log lines; `write` writes a line in any process.
- `ram_settings`: names of settings that bound the RAM of a router.
- `model_limits(config)`: like `engine_limits`, for a `ModelOptions`.
- `model_asked(config)`: like `asked`, for a `ModelOptions`.
- `asked(config)`: a pair for each feature of the part, see `AppConfig.asked`; `refusals`: rows of `runtime.refusals`.
- `engine_limits(config)`: limits of an engine, which replace settings of the same names.
- `text_identity(config)`: text describing settings that affect tokens, see `AppConfig.text_identity`.
- `variant_names(config)`: names of variants of the model that requests may pass as `model`.
- `served(config)`: settings per model, see `AppConfig.served`; `with_served(config, served, names)`: settings of
  several models; in each model's entry, the fields `names` are set to their values in `served`.
- `leaves_gpus_open(config)`: see `AppConfig.leaves_gpus_open`; `take_gpus(config, in_cluster, say)`: settings with
  GPU shares chosen for the GPUs of the Ray cluster or of this machine; `say` shows a line about the choice.

The command and HTTP:

- `check_arguments(args, takes_folder)`: raises `cli.options.UserError` for words of a command line, before the options
  of the command are imported; `takes_folder` is whether the first word is a folder.
- `wants_door(config)`: whether a router is to listen itself; `open_door(host, port)`: object with `key`, `port` and
  `close()`, or ValueError, one line. In the router, `key.host` is the address, and `key.listen(app, max_requests)`
  returns a server with `close(timeout_s)`.
- `guard_ray(session, processes)`: object with `pid`, `stand_down()` and `close()` that guards the Ray cluster of a
  launcher; arguments are the folder of the session and Ray's processes by name.
- `option_panel(config_class)`: function from a setting's name to the title of its group in help, or None;
  `option_place(parameter)`: sort key of an option in help; `command_class`: class of commands that shows the groups.
- `start_up()`: a `start_up.StartUp` that shows more of a start.
- `add_commands(app)`: adds commands of `wingbeat`, see `cli.main`.
- `words_of_serve(args, settings)`: translates the arguments of `wingbeat serve` to options of `settings`; returns
  the options, and a line about each argument that is ignored.
- `speculative_settings(said, beside)`: settings that replace a `speculative_config` of vLLM; `beside` are the other
  settings that were given.
- `hint(option, own, write)`: advice for an unknown option; `own` are the command's settings, and `write` returns a
  setting's name as the user writes it.
- `head_findings(folder, target)`: for a draft head of the part's kind: lines that `inspect` prints, the number of
  parameters, and the numbers per token in the head's KV cache.
- `inspects(folder, as_json)`: prints a folder of the part's own kind and returns True.
- `add_routes(app, models)`: adds routes to the HTTP application, see `api.routes`.
- `surface(config)`: values that the part's routes need from the settings, by name, in `CompletionService.of_parts`.
- `router_base`, `verifier_base`: class with further methods of a router or verifier, which Serve or other deployments
  call by its handle.
- `add_router_routes(app, fronts)`: adds routes that need a router's `ModelFront`s.
- `operator_paths`: paths of the part's routes that need an operator's key; `optional_bodies`: paths whose POST may
  have no body.
- `add_last(app)`: adds routes that describe all routes added before.
- `bodies`: body class by path, for the part's POST routes.
- `unserved_fields(path)`: request fields that an endpoint does not support, see `api.bodies.unserved_fields`.
- `sampling_fields()`: class of fields for all requests that generate, see `api.bodies.sampling_fields`.
- `generation_fields`: class of fields for HTTP requests that generate, see `api.bodies.requests`.
- `chat_fields()`, `message_fields`: classes of fields of chats and of their messages, see `api.bodies.chat_fields`.
- `chat_reader(config, template)`: an `api.completions.ChatReader` for a model with this chat template.
- `beginning(pool, body, variant)`: saved prefix that a request's prompt begins with, see `api.prompts`.
- `content_parts(api)`: readers of content parts other than text, see `api.bodies.content_parts.part_readers`.
- `other_forms(body, in_parts)`: further forms of a chat's messages, tried in order if the chat template refuses them.
- `prompt_reader(config, takes, folder, tokenizer)`: an `api.prompts.PromptReader` for these content parts of a model.
- `prompt_details(spans)`: `prompt_tokens_details` of an answer's usage.
- `needs_torch(folder)`: whether preparing requests of a checkpoint needs torch.
- `error_body(path, error)`: body of an error on the part's routes, if it has another form than OpenAI's.
- `request_watcher(config)`: an `api.guard.RequestWatcher` that sees every request.
- `families(snapshot)`: Prometheus metric families.
- `router_figures(router_id, num_admitted)`: a router's figures of its requests to one model, as
  `metrics.fleet_figures.OwnFigures`, `api.completions.ClientFigures` and `api.guard.RequestWatcher`.
- `router_reports()`: object of an engine whose `exchange(report)` stores a router's report and returns figures.
- `live_settings`: fields of `LiveOptions`, in the form of `settings`.
- `follow_live(fronts)`: object whose `apply(live)` applies a router's `LiveOptions`, called before other settings.

A replica and its processes:

- `beside_engine(config, figures)`: object with `tasks()`, which run as long as the replica, and `figures()`.
- `scaling_config(given)`: Serve's autoscaling settings of the verifiers, made from the operator's.
- `replica_tasks(verifier)`: task that runs as long as the replica.
- `publish(model_name, engine_id, stats)`: task that runs as long as the replica and exports `Verifier.stats`.
- `names`: kinds of named things that requests use and engines keep, see `fleet.catalog`.
- `variants(config, engine)`: variants of the model that are served from the start, in `ModelInfo`.
- `keepers(config, engine)`: by kind, the object that keeps named things in an engine, see
  `replica.engine.engine_setup`.
- `operations(keepers)`: operations that routers may call on an engine, by name, see `EveryEngine.operate`.
- `serve_engine(config, engine)`: a `ServedEngine` around the engine; `engine_operations(engine)`: as `operations`.
- `changes_weights(config)`: True if weights change while they are served, which makes cached keys and values stale.
- `shared_tensors(info, device, check)`: context manager of the tensors, by name, that an update of weights leaves in
  another process's memory; None if they come in another way. `check` is `ServedWeights.check`.
- `replica_engines(config, store_key, new_life)`: a `ReplicaEngines` with further abilities; replicas of one build of
  the application have equal `store_key`s.
- `num_ranks(config)`: processes of each verifier, if there are several.
- `num_shared_drafters(config)`: number of drafters that verifiers share; `bind_drafters(config, mark)`: their Serve
  application, with `mark` as suffix of deployment names; `launch_drafter(config, bound, channel)`: function that
  takes pickled `DrafterTerms` or None, and returns a `DrafterHandle` for a verifier's slots in a shared drafter.
- `shared_worker(config, worker)`: a `replica.drafters.drafter_thread.Worker` that serves several verifiers with the
  drafter of a `DraftWorker`; None if the drafter has one verifier.
- `wait_for_any(bells, ready, timeout_s, quiet_since)`: waits for a round of any of several verifiers.
- `address(config)`: this node's address, if rounds go to a drafter on another node.
- `pair_channel(config, name, spec, address)`: a `replica.engine.pair_channel.PairChannel` of another kind than shared
  memory; `address` is that of this node if the drafter connects over the network, else None.
- `drafter_supervisor(config, started)`: class of the drafter's supervisor for an `EngineStarted`, see
  `replica.drafters.supervisor`.
- `network_channel`: class of channel made as `(address, spec, device)`, whose name is not a string.
- `device_channel`: class of channel through GPU memory, whose name is a string.
- `try_device_channel(device, peer)`: raises ChannelError if the device channel does not work between these GPUs.
- `lend(config, loaded, device)`: weights that a verifier lends its drafter, in `DrafterTerms`;
  `borrow(config, device)`: a `Lender` that receives them. None if the two do not share a GPU.
- `launch_ranks(config)`: launches the other ranks of an engine, see `replica.engine_life.OtherRanks`.
- `serve_grammars(grammars)`: compiler of requests' grammars beside an engine, see `replica.engine.engine_setup`.
- `refuses_weights(config)`: reason why new weights of the verifier cannot be pushed.
- `share_spans(sent)`: moves the media spans of a `WireRequest` to shared memory, and returns the request and the
  memory's file descriptor; `attach_spans(sent)`: restores the request in the engine.
- `tapped(config, needs, num_layers)`: layers of the verifier to tap, given the drafter's needs.
- `observe(config, engine, engine_id)`: a `TrafficRecording` of the engine's requests.
- `follow_head(config, worker)`: called with each drafter worker that is built.
- `keeps_weak_head(config)`: True if a head that fails its self-test is kept, because it will be trained.
"""

from typing import Any

from wingbeat.kernels.parts import hooks_of, merged_of

PARTS = (
    *("start_checks", "memory_check", "local", "bench", "inspection", "doctor", "tensorrt", "training", "recordings"),
    *("learning", "grammars", "ranks", "embeddings", "api.tokens", "api.token_generation", "api.description"),
    *("api.foreign", "api.handles", "api.parsed", "api.responses_api", "api.messages_api", "page", "spans"),
    *("round_traces", "prefixes", "rollouts", "rollouts.ipc", "weights", "two_nodes", "gpu_memory", "shared_drafters"),
    *("vllm_words", "several_models", "one_pass", "lora", "media", "named_models", "gpu_shares", "ray_metrics"),
    *("cpu_activations", "suffix_beside", "client_metrics", "front_door", "ray_guard", "live_settings", "load_policy"),
    *("help_panels", "repeated_lines", "api.template_forms", "api.load_route", "start_progress"),
    "refused_models",
)
"""Folders of the installed parts, in the order in which their hooks are called."""


def hooks(name: str) -> tuple[Any, ...]:
    """Returns the hooks named `name` of all installed parts."""
    return hooks_of(__package__, PARTS, name)


def merged(name: str, *given: Any) -> dict[str, Any]:
    """Merges the hooks named `name`, which are mappings or functions that return mappings for the arguments `given`."""
    return merged_of(hooks(name), given)


def first_result(name: str, *given: Any) -> Any:
    """Calls the hooks named `name` in order; returns the first result that is not None, or None."""
    return next((answer for hook in hooks(name) if (answer := hook(*given)) is not None), None)
