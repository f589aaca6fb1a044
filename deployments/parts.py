"""Optional parts of the application: a part is a folder that can be deleted, and no other file names one.

A part's module `part` has what it adds, under the names below, and is light to import; `python -m tests.without NAME`
takes a part out. `config` is an `AppConfig`; a part whose settings ask for nothing returns None.

Settings:

- `settings`: fields of `AppConfig` by name, as `pydantic.create_model` takes them; their `json_schema_extra` may have
  the `panel` of `cli.panels` that they stand in.
- `model_settings`: likewise, fields of `ModelOptions`, which commands have too that run a model without a server.
- `check_settings(config)`: raises ValueError, one line, for what no single field can see.
- `check_before_start(config)`: the same for what is asked of this machine, before anything is deployed.
- `check_memory(config, file)`: the same for the memory of this machine, where the application runs on it alone.
- `ram_settings`: settings that say how much of the RAM a router may take.
- `model_asked(config)`: as `asked`, of a `ModelOptions`.
- `asked(config)`, `refusals`: rows of `runtime.refusals`, and which of them are asked for.
- `engine_limits(config)`: limits of an engine, in the place of settings of their names.
- `text_identity(config)`: words about what decides texts, see `AppConfig.text_identity`.
- `variant_names(config)`: names of variants of the model that requests may give as `model`.
- `served(config)`: see `AppConfig`, where settings are of several models; `with_served(config, served, names)`: those
  settings, of whose models `names` are as in `served`.
- `leaves_gpus_open(config)`: see `AppConfig`; `take_gpus(config, in_cluster, say)`: settings with shares of the GPUs
  of the Ray cluster, or of this machine, where `config` leaves them open; `say` gets a line about them.

The command and HTTP:

- `add_commands(app)`: commands of `wingbeat`, see `cli.main`.
- `words_of_serve(args, settings)`: the words of `wingbeat serve` as options of these settings, and lines about others.
- `speculative_settings(said, beside)`: settings for a `speculative_config` of vLLM's, the others given.
- `hint(option, write)`: what to use in the place of an option that there is not, its settings as `write` has them.
- `head_findings(folder, target)`: of a head of the part's kind, what `inspect` prints, parameters, and numbers in its
  KV per token.
- `inspects(folder, as_json)`: True once a folder of the part's own kind is printed.
- `add_routes(app, models)`: routes of the HTTP application, see `api.routes`.
- `surface(config)`: what its routes need of a model's settings, by name: in `CompletionService.of_parts`.
- `router_base`: a class with more methods of a router, which other deployments call by its handle.
- `add_router_routes(app, fronts)`: routes that need a router's `ModelFront`s.
- `operator_paths`: those of them that are for operators; `optional_bodies`: those whose POST may have no body.
- `add_last(app)`: routes about all that were added before.
- `bodies`: what is posted to these routes, by path.
- `unserved_fields(path)`: fields that are not served at an endpoint, see `api.bodies.unserved_fields`.
- `sampling_fields()`: a class of fields of all requests that generate, see `api.bodies.sampling_fields`.
- `generation_fields`: a class of fields of requests that generate, see `api.bodies.requests`.
- `chat_fields()`, `message_fields`: classes of fields of chats and of their messages, see `api.bodies.chat_fields`.
- `chat_reader(config, template)`: an `api.completions.ChatReader` of a model with this chat template.
- `beginning(pool, body, variant)`: what a request's prompt begins by, see `api.prompts`.
- `content_parts(api)`: readers of content parts that are no text, see `api.bodies.content_parts.part_readers`.
- `prompt_reader(config, takes, folder, tokenizer)`: an `api.prompts.PromptReader` of these parts for a model.
- `prompt_details(spans)`: `prompt_tokens_details` of an answer's usage.
- `needs_torch(folder)`: whether requests of a checkpoint are prepared with torch.
- `error_body(path, error)`: an error's body below these routes, where it has a form of its own.
- `request_watcher(config)`: an `api.guard.RequestWatcher` that sees every request; None where nothing is asked for.
- `families(snapshot)`: metrics of Prometheus.
- `live_settings`: fields of `LiveOptions`, as `settings` has those of `AppConfig`.
- `follow_live(fronts)`: something whose `take(live)` lets a router's `LiveOptions` hold, before its models do.

A replica and its processes:

- `beside_engine(config, figures)`: something with `tasks()`, which run as long as the replica, and `figures()`.
- `publish(model_name, engine_id, stats)`: what runs as long as the replica, and shows `Verifier.stats` elsewhere.
- `names`: kinds of things that requests name and engines keep, see `fleet.catalog`.
- `variants(config, engine)`: variants of the model that are served from the start, in `ModelInfo`.
- `keepers(config, engine)`: by kind, what keeps them in an engine, see `replica.engine.engine_setup`.
- `operations(keepers)`: what routers may ask of an engine, by name, see `EveryEngine.operate`.
- `serve_engine(config, engine)`: a `ServedEngine` around the engine; `engine_operations(engine)`: as `operations`.
- `changes_weights(config)`: True where weights change while they are served, which no keys and values outlive.
- `replica_engines(config, memory, new_life)`: a `ReplicaEngines` that does more.
- `num_ranks(config)`: processes of each verifier, where these are several.
- `num_shared_drafters(config)`: drafters that verifiers share; `bind_drafters(config, mark)`: the Serve application of
  these, of a model whose deployments' names end by the mark; `launch_drafter(config, bound, channel)`: gives a verifier
  a place there, as a function of pickled `DrafterTerms` or None to a `DrafterHandle`.
- `wait_for_any(bells, ready, timeout_s, quiet_since)`: for a round of several verifiers.
- `address(config)`: this node's, where the verifier's rounds go to a drafter on another one.
- `network_channel`: a kind of channel made as `(address, spec, device)`, whose name is no string.
- `device_channel`: a kind of channel through the memory of a GPU, whose name is a string.
- `try_device_channel(device, peer)`: raises ChannelError where that does not carry between these GPUs.
- `lend(config, loaded, device)`: weights that a verifier lends its drafter, in `DrafterTerms`;
  `borrow(config, device)`: a `Lender` that is told of them. None where the two share no GPU.
- `launch_ranks(config)`: launches the others of an engine, see `replica.engine_life.OtherRanks`.
- `serve_grammars(grammars)`: what compiles those of requests beside an engine, see `replica.engine.engine_setup`.
- `refuses_weights(config)`: why other weights of the verifier cannot be pushed.
- `share_spans(sent)`, `attach_spans(sent)`: a `WireRequest` with the spans of its prompt in memory that the engine
  maps, and that memory's file descriptor; and the request that it was.
- `tapped(config, needs, num_layers)`: what the verifier is tapped for, the drafter's needs given.
- `observe(config, engine, engine_id)`: a `TrafficRecording` of what the engine serves.
- `follow_head(config, worker)`: called with each drafter that is built.
- `keeps_weak_head(config)`: True where a head that fails its self-test is kept all the same, to become better.
"""

from typing import Any

from wingbeat.kernels.parts import hooks_of, merged_of

PARTS = (
    *("memory_check", "local", "bench", "inspection", "doctor", "tensorrt", "training", "recordings", "learning"),
    *("grammars", "ranks", "embeddings", "api.tokens", "api.description", "api.foreign", "api.handles", "api.parsed"),
    *("api.responses_api", "api.messages_api", "page", "spans", "round_traces", "prefixes", "rollouts", "weights"),
    *("two_nodes", "gpu_memory", "shared_drafters", "vllm_words", "several_models", "one_pass", "lora", "media"),
    *("named_models", "gpu_shares", "ray_metrics", "cpu_activations", "suffix_beside"),
)
"""Their folders, in the order in which they add."""


def hooks(name: str) -> tuple[Any, ...]:
    """Hooks of that name in the parts that are there."""
    return hooks_of(__package__, PARTS, name)


def merged(name: str, *given: Any) -> dict[str, Any]:
    """The mappings of that name as one, or those that functions of that name make of what is given."""
    return merged_of(hooks(name), given)


def first(name: str, *given: Any) -> Any:
    """What the first part answers that has an answer; None where none has."""
    return next((answer for hook in hooks(name) if (answer := hook(*given)) is not None), None)
