"""Registry of optional runtime parts: a part is a folder that can be deleted, and no other file imports it.

A part's module `part` defines hooks under the names below, and is cheap to import; see `deployments.parts` for the
application's hooks. If a hook returns None, its part does not handle the case, and the next part's hook is called.

- `drafter_kinds`: list of `drafters.drafter_kind.DrafterKind`.
- `draft_passes(drafter)`: a `drafters.head_drafter.HeadPasses` with non-torch passes for a
  `drafters.head_drafter.HeadDrafter`; None if torch drafts.
- `host_round(kv_dtype)`: the runner class of engines on a CPU over KV of this dtype; None for the device round.
- `speculation(loaded, runner, config)`: an `engine.speculation.Speculation` that adapts trees to measured costs; None
  for fixed trees. `host_speculation(runner)`: the class of that object for a runner from `host_round`.
- `pruner(num_slots, max_depth, device)`: a `round.rows.Pruner` for an engine that adapts trees.
- `whole_rounds(runner, worker, end)`: the rounds of an engine's runner and of the drafter in its process that are
  captured as one graph, see `one_graph.whole_rounds`; None if there are none. `num_whole_rounds(config)`: the maximum
  number of these graphs.
- `growth_rule(outcome, header)`: a `drafters.base.GrowthRule`, read from the outcome of an engine that adapts trees;
  None if every level is grown.
- `bin_edges()`: boundaries of the bins of `Outcome.acceptance_table`, as log-probabilities.
- `shared_tokens(draft, draft_size, target, target_size)`: a `heads.vocabulary.SharedTokens` of a draft model's folder
  and a verifier's, for vocabularies that differ; sizes are rows of embeddings. None if the two vocabularies cannot be
  compared.
- `compressed_head(body, layout, shapes)`: config class and extra fields of an EAGLE-3 head with compressed (latent)
  attention; see `heads.head_config`.
- `meant_fields(fields)`: a config's fields, with values in other spellings converted. `config_problem(fields)`: a text
  that names a config's first impossible field; None if all fields are possible.
- `other_family(raw, names)`: the error for a checkpoint with this config and these tensor names, if it is a head of
  another family than EAGLE; else None.
- `another_verifier(raw, shapes, target, is_eagle1)`: a clause that names the verifier for which a head with this config
  and these tensor shapes was made, if the sizes of `target` differ from that verifier's; None if no size differs.
- `fuse_head(head)`: a `fused.levels.FusedLevel` of a head on a GPU; None if the head's own steps are used.
- `fp8_head(head)`: rounds the linear weights of an EAGLE head to FP8, in place.
- `choose_convention(source, target, loaded, tokenizer)`: a choice among the conventions that a head's files leave open,
  with `best.convention` and `as_dict()`; None if only one is possible.
- `family_of_head(folder)`: the family of a head, according to the head's files; None if the head belongs to
  no family of the part.
- `trained_families`: by family name, the path `module:function` of a function () -> `training.family.Family`.
- `published_rules(num_slots, device)`: a `draft_rules.published_rules.PublishedRules`, which tells drafters the
  requests' sampling rules. `draft_rules(draft_token_ids)`: a `draft_rules.draft_rules.DraftRules`, which applies the
  rules to a drafter's logits, whose columns have these token ids.
- `drawn_tree(given)`: a `config.DrawnTree` from a user's value; raises ValueError if the value is no tree.
- `tree_table(tree, num_reqs, top_k, device)`: growth of drawn trees, as `kernels.tree.table.TreeTable`.
- `feature(loaded)`: a feature of a model's rounds, see `round.rows.Feature`. `lean_rounds(config)`: whether rounds that
  do not use the part's feature are captured apart, see `Feature.can_be_absent`.
- `masker(request, grammar)`: a `scheduling.sequence.TokenMasker` for a request with masks. `token_masks(tables)`: fills
  the masks of a round, see `masks.allowed_tokens.TokenMasks`.
- `grammars(tokenizer, vocab_size, eos_token_ids)`: a compiler of requests' grammars, see `scheduling.maskers`.
- `add_nodes(plan, trees, shape, device)`, `add_nodes_on_host(plan, trees, shape)`: returns a round's trees with the
  part's nodes added, for a plan with `adds_nodes`. `add_nodes` pads trees to the shape's width, on any device;
  `add_nodes_on_host` makes trees as wide as needed, on the host. `trees` is None if no trees arrived.
- `prompt_shapes(config, batches, most)`: a `prompt_graphs.prompt_shapes.PromptShapes` of captured rounds with prompt
  chunks. `prompt_graphs(graphs, shapes, last_position)`: a `prompt_graphs.prompt_rounds.PromptGraphs`, which runs them.
- `shown_rounds(drafting)`: a `shown_rounds.shown_rounds.ShownRounds`, which records rounds of requests with `trace`.
- `recorded_contexts(block_manager, taps_size, dtype)`: an `engine.drafter_context.RecordedContexts`.
- `deferral(spec, slots)`: buffers of a channel's pairs for the drafter that are sent later, see
  `deferral.deferred_pairs.DeferredPairs`.
- `text_drafts(config, speculation)`: an `engine.text_drafts.TextDrafts` that builds trees from earlier text beside a
  drafter; None if the settings request none.
- `engine_settings`: mapping from names of further `EngineConfig` fields to type and default.
- `check_limits(config)`: raises ValueError, in one line, for an `EngineConfig` with unsupported values.
- `refusals`: further rows of the table in `runtime.refusals`, which are checked when a model loads.
- `extend_model(loaded, config)`: extends a whole verifier that torch runs, see `verifier.layers.model_part`.
- `extend_shard(loaded, ranks, config)`: extends one rank's shard of a verifier.
- `open_trial(model, texts, whole, refused)`: a test of the media spans that a model accepts, for `model_trial`, before
  the model's layers are switched; None for a text model. The test's `serve(loaded)` adds a `SpanReader`, or returns
  the reasons why spans cannot be served, by kind of span.
- `read_span(fields)`: a prompt span from the result of `PromptSpan.as_fields`.
- `remembered(layers)`: the state of a model's layers in addition to keys and values, see `verifier.layers.model_part`.
- `other_folder(folder)`: description of a folder without config.json, and what to give instead; None for other folders.
- `lay_out_linears(module, deterministic)`: stores weights in the layout that the device reads fastest, or makes linear
  layers use the part's kernels, see `verifier.layers.linears`.
- `pack_segments(segments, dtype)`: a `round.rows.PackedSegments` over KV of this dtype; None if the part does not
  attend.
- `fuse_layers(model, layers, attention, deterministic, division)`: replaces a verifier's norms, rotations and decoder
  layers by faster ones that compute the same; `attention` are the layers' `kv.pool.LayerAttention`.
- `attentions`: by class name of attention modules, the `fused.attention.AttentionHalf` that computes them.
- `swap_layers(parameter, deterministic)`: a `fused.layers.Swap` for layers with this parameter's device and dtype; None
  leaves the layers unchanged. `finish_layers(model, layers)` is called after all layers were processed.
- `choose_experts(model)`: replaces routers and experts of mixtures by faster ones, before layers are switched.
- `model_trial(model, probed, division, deterministic, folder)`: a test of a model that is created before the model's
  layers are switched; its `check(loaded)` raises UnsupportedModelError if the switched model computes other logits.
- `promised_bytes()`: bytes of this machine that engines have reserved and not used yet. `settling()`: context manager
  that yields a function (num_bytes) which reserves memory; others wait meanwhile. `host_zeros(shape, dtype)`: a zero
  tensor in reserved memory.
- `choose_kernels(device, dtype, fp8_cache, model)`: replaces wrong kernels of a GPU by their references.
- `check_graphs(engine, tokenizer)`: pauses the replay of graphs that compute other tokens than eager rounds.
- `drafter_check(tokenizer, name, allow_bad)`: function that tests an idle engine's drafter, raises ValueError for a bad
  drafter, and whose result has `as_dict()`.
- `load_in_faster_dtype(folder, device, deterministic)`: a verifier on a CPU, loaded in the faster dtype; None if only
  one dtype comes into question. `choose_threads(loaded, most)`: sets the number of torch's threads, at most `most`.
- `round_linears(model, layers)`: rounds weights to int8, before anything is tested; raises UnsupportedModelError.
- `rows_alike`: mapping from device types to the path of the deterministic mode's module. In that module,
  `check(model)`, called before a model's layers are switched, and `make(model, layers)`, called afterwards, raise
  UnsupportedModelError; `check_limits(config)` raises ValueError; rounds use the module's `pack_segments`.
- `adapt_layer(layer, stacks)`: applies adapters to the matrix products of a layer that the part has swapped.
- `adapt_product(linear)`: a function that replaces `kernels.lora.adapters.add_adapters`; None keeps that function.
- `pack_weight(module, weight, bias, place)`: a `GroupedWeight` packed for the kernels of a `Place`, for the module that
  will hold it; None if there are no such kernels. `pack_experts(count, gated, read, place)`: likewise for experts,
  where `read(kind, expert)` reads an expert's weight and bias of kind `gated` or `down`. `keep_packed(module, held)`
  gives the part's packed weight to a module; None if another part packed it.
- `join_packed(linears)`: the matrix products of linear layers with the same input, as one function of rows; None if no
  layer is packed.
- `kernel_head(head)`: a draft head with its weights packed for drafting kernels; None for other heads.
- `why_not_compiled()`: the reason why code that is compiled on first use is missing on this machine; None if it is
  compiled.
- `library_fingerprint()`: identifies the compiled code with which a machine's speed was measured.
- `uneven_kv(fields)`: whether layers of a model with these config fields have KV memory of unequal sizes.
- `check_quantiser(config)`: raises ModelCheckpointError for a quantised checkpoint that is not supported.
- `named_model(source)`: whether the text is the name of a published model, which `folder_of` resolves; None for others.
- `meant_name(source)`: the name of a published model that is like a word; None if there is none.
- `own_head(source)`: the folder of the draft head that comes with Wingbeat for the name of a published model; None if
  there is no such head. `gains_by_suffix(source)`: whether suffix drafts beside that head make it faster on CPUs.
- `folder_of(source)`: a Hugging Face folder that represents a model file of another format; None for other sources.
- `files_of(folder)`: the model files that a folder from `folder_of` represents; None for other folders.
- `served_weights(loaded)`: writer of a model's weights while the model is served. `change_memory(loaded, layers, step,
  change, what)`: one step of a sleep or wake-up of a rank with the KV of these layers.
- `rows_of(loaded)`: where drafters find the embedding and the output matrix of a verifier after an update;
  `follow_rows(place, worker)`: makes the drafter of a worker use them.
- `request_rules(folder, vocab_size)`: a function that adds the rules of a model's files to a request.
- `render_apart(template, messages, variables, special_tokens)`: a conversation rendered with a request's own template.
- `lent_tensors(folder)`: readers, by tensor name, of the input embedding and the output head of a folder from
  `folder_of`.
- `stored_shapes(folder)`: shapes of the tensors of a folder from `folder_of`, by the model file's own tensor names; for
  a draft head, by the names of the head's layout.
- `stored_tensors(folder)`: tensors of a draft head in a folder from `folder_of`; None for other folders.
- `load_quantised(config, load, packed)`: loads a quantised model; see `verifier.checkpoints.checkpoint`.
- `quantised_head(settings)`: reader of a quantised draft head or MTP module, chosen by `settings`, the checkpoint's
  `quantization_config` ({} if absent). The reader's `shapes(stored)` and `tensors(stored)` return shapes and tensors of
  plain weights, see `heads.plain_weights`.
- `open_backend(settings, device)`: a backend that runs a verifier instead of torch in this process alone; None if the
  settings do not request one.
- `extend_engine(directory, loaded, device)`: extends a verifier that a compiled engine runs.
- `embedded_rows(columns)`: rows of an engine's batch that have their own embeddings; None without such rows.
- `encoder_of(loaded)`, `export_encoder(loaded, encoder, limits, ops, file)`, `encoder_profiles(limits)`: for an engine
  directory, the config of the vision or audio encoder, the encoder's export to an ONNX file, and the sizes for which
  the encoder is built.
- `open_drafter(settings, device)`: a drafter from the engine directory; None for kinds that torch runs.
- `graph_limits`, `graph_fields`: fields of `tensorrt.limits.Limits` and of `BaseEngineConfig` by name, as
  `pydantic.create_model` takes them.
- `graph_room(loaded, limits)`, `graph_inputs(config)`: a `tensorrt.more_inputs.MoreInputs` of a verifier to be
  exported, and of an engine directory; None if there is none.
- `beyond_graph(config, limits)`: name and value of an engine's limit, and name and value of the smaller limit of its
  graph.
"""

from typing import Any

from wingbeat.kernels.parts import hooks_of, merged_of

PARTS = (
    *("fused", "experts", "model_trial", "engine_checks", "promises", "deferral", "masks", "prompt_graphs"),
    *("shown_rounds", "prefixes", "kv_windows"),
    *("cpu", "adaptive", "cpu.adaptive", "cpu.activations", "cpu.lora", "cpu.one_pass", "tensorrt", "ngram", "suffix"),
    *("suffix_beside", "mtp", "one_pass", "assistants", "draft_model", "foreign_vocabulary"),
    *("user_drafter", "conventions", "own_template", "training.mtp", "training.one_pass", "grammar", "state"),
    *("quantised", "packed", "named_models", "tensor_parallel", "pooling", "lora", "tensor_parallel.lora"),
    *("tensorrt.lora", "media", "tensorrt.media", "one_graph", "drawn_trees", "latent_heads", "rollouts", "alike"),
    *(
        "latent_attention",
        "fp8_heads",
        "belonging",
        "draft_rules",
        "config_values",
        "head_families",
        "generation_rules",
    ),
)
"""Names of the parts' folders, in the order in which the parts' hooks are called."""


def hooks(name: str) -> tuple[Any, ...]:
    """Returns the hooks with this name, of all parts that exist."""
    return hooks_of(__package__, PARTS, name)


def merged(name: str) -> dict[str, Any]:
    """Merges the mappings with this name, of all parts, into one mapping."""
    return merged_of(hooks(name))


def first_result(name: str, *given: Any) -> Any:
    """Calls the hooks with this name in order; returns the first result that is not None, else None."""
    return next((answer for hook in hooks(name) if (answer := hook(*given)) is not None), None)
