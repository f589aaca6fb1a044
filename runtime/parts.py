"""Optional parts of the runtime: a part is a folder that can be deleted, and no other file names one.

A part's module `part` has what it adds, under the names below, and is light to import; see
`deployments.parts` for those of the application.

- `drafter_kinds`: each a `drafters.drafter_kind.DrafterKind`.
- `draft_passes(drafter)`: passes of a `drafters.head_drafter.HeadDrafter` that are not torch's, as
  `drafters.head_passes.HeadPasses`; None where torch drafts.
- `host_round(kv_dtype)`: the `engine.round_kind.RoundKind` of engines on a CPU over keys and values of this dtype; None
  where they run that of devices.
- `compressed_head(body, layout, shapes)`: class of the config of an EAGLE-3 head of compressed attention, and its
  fields beside those of plain attention; see `heads.head_config`.
- `choose_convention(source, target, loaded, tokenizer)`: a choice among the readings that a head's files leave, with
  `best.convention` and `as_dict()`; None where they leave one.
- `family_of_head(folder)`: the family of a head by its files; None for other heads.
- `trained_families`: the function () -> `training.family.Family`, as `module:function`, by the name of the family.
- `drawn_tree(given)`: a `config.DrawnTree` of what a user gave; raises ValueError where it is none.
- `tree_table(tree, num_reqs, top_k, device)`: growth of such trees, as `kernels.tree.table.TreeTable`.
- `feature(loaded)`: a feature of a model's rounds, see `round.rows.Feature`.
- `grammars(tokenizer, vocab_size, eos_token_ids)`: compiles what answers must match, see `scheduling.maskers`.
- `add_nodes(plan, trees, shape, device)`, `add_nodes_on_host(plan, trees, shape)`: trees of a round whose plan
  `adds_nodes`, with those of the part in them: as wide as the shape says wherever they lie, or on the host as wide as
  they must be. There may be no trees before.
- `text_drafts(config, speculation)`: a `engine.text_drafts.TextDrafts` that makes trees of earlier text beside a
  drafter's; None where the settings ask for none.
- `engine_settings`: fields of `EngineConfig` by name, each with its type and its default.
- `check_limits(config)`: raises ValueError, one line, for an `EngineConfig` whose values it cannot have.
- `refusals`: rows of `runtime.refusals`, of what is known once a model loads.
- `extend_model(loaded, config)`: adds to a verifier that torch runs as a whole, see `verifier.layers.model_part`.
- `extend_shard(loaded, ranks, config)`: the same for a rank's part of one.
- `open_trial(model, texts, whole, refused)`: a trial of the spans of prompts that a model takes, before its layers are
  switched; None for a model of text. Its `serve(loaded)` adds a `SpanReader`, or returns why not, by kind.
- `read_span(fields)`: a span of a prompt of what `PromptSpan.as_fields` made.
- `remembered(layers)`: what layers of a model remember beside keys and values, see `verifier.layers.model_part`.
- `other_folder(folder)`: what a folder without a config.json is, and what to give instead; None for other folders.
- `lay_out_linears(module, deterministic)`: stores weights as its device reads them, or lets linear layers multiply by
  kernels of the part, see `verifier.layers.linears`.
- `pack_segments(segments, dtype)`: a `round.rows.PackedSegments` over keys and values of this dtype; None where others
  attend.
- `swap_layers(parameter, deterministic)`: a `verifier.layers.fused.Swap` of layers like this parameter; None where they
  are left alone. `finish_layers(model, layers)` follows, once all are swapped that can be.
- `round_linears(model, layers)`: rounds weights to int8, before anything is tried; raises UnsupportedModelError.
- `rows_alike`: by type of device, the path of the module of deterministic mode: its `check(model)` before a model's
  layers are switched, and `make(model, layers)` behind that, raise UnsupportedModelError, and `check_limits(config)`
  ValueError for an engine over it; its `pack_segments` is the one that rounds take.
- `adapt_layer(layer, stacks)`: lets adapters act on the products of a layer that a part has swapped.
- `adapt_product(linear)`: a function in the place of `kernels.lora.adapters.add_adapters`; None where that adds.
- `pack_weight(module, weight, bias, place)`: a `GroupedWeight` as kernels of a place read it, for a module that will
  hold it; None where they do not. `pack_experts(count, gated, read, place)`: likewise of experts, whose
  `read(kind, expert)` reads one's weight and bias, of the kinds `gated` and of `down`. `keep_packed(module, held)`
  gives what the part made to a module; None for what another made.
- `join_packed(linears)`: products of linear layers of one input as one function of rows; None where none is packed.
- `kernel_head(head)`: a draft head as kernels that draft read it, its weights packed; None for other heads.
- `why_not_compiled()`: why code that is compiled on its first use is missing on this machine; None once it is compiled.
- `library_fingerprint()`: which compiled code it is that a machine's speed was measured with.
- `check_quantiser(config)`: raises ModelCheckpointError for a quantised checkpoint that is not read.
- `named_model(source)`: whether a word is the name of a published model, which `folder_of` takes; None for others.
- `own_head(source)`: the folder of the draft head that comes with Wingbeat for such a name; None where there is none.
- `folder_of(source)`: the folder of Hugging Face that stands for a model's file of another format; None for others.
- `files_of(folder)`: the files of the model that such a folder stands for; None for other folders.
- `served_weights(loaded)`: weights of a model that are written while it is served.
- `render_apart(template, messages, variables, special_tokens)`: a conversation by a template that a request brings.
- `lent_tensors(folder)`: readers of the input embedding and the output matrix of a folder of such a file, by name.
- `stored_shapes(folder)`: shapes of its tensors by the file's own names, of a draft head by those of the head's layout.
- `stored_tensors(folder)`: tensors of a draft head in such a file; None for other folders.
- `load_quantised(config, load, packed)`: the model of one that is; see `verifier.checkpoints.checkpoint`.
- `quantised_head(settings)`: reader of a draft head or MTP module that is quantised, by its `quantization_config`, {}
  where it has none; `shapes(stored)` and `tensors(stored)` are those of plain weights, see `heads.plain_weights`.
- `open_backend(settings, device)`: what runs a verifier in the place of torch in this process alone; None where
  the settings ask for no such thing.
- `extend_engine(directory, loaded, device)`: adds to a verifier that an engine runs.
- `embedded_rows(columns)`: rows of an engine's batch that have embeddings of their own; None without such.
- `visual_of(loaded)`, `export_visual(loaded, visual, limits, ops, file)`, `visual_profiles(limits)`: of an engine
  directory's vision encoder what its config says, its ONNX file, and the sizes it is built for.
- `open_drafter(settings, device)`: a drafter from the same directory; None for kinds that torch runs.
- `graph_limits`, `graph_fields`: fields of `tensorrt.limits.Limits` and of `BaseEngineConfig` by name, as
  `pydantic.create_model` takes them.
- `graph_room(loaded, limits)`, `graph_inputs(config)`: a `tensorrt.more_inputs.MoreInputs` of a verifier that is to be
  exported, and that of an engine directory; None where there is none.
- `beyond_graph(config, limits)`: name and value of a limit of an engine, and name and value of what its graph has.
"""

from typing import Any

from wingbeat.kernels.parts import hooks_of, merged_of

PARTS = (
    *("cpu", "cpu.activations", "cpu.lora", "cpu.one_pass", "tensorrt", "ngram", "suffix", "suffix_beside"),
    *("mtp", "one_pass", "assistants", "draft_model"),
    *("user_drafter", "conventions", "own_template", "training.mtp", "training.one_pass", "grammar", "state"),
    *("quantised", "packed", "named_models", "tensor_parallel", "pooling", "lora", "tensor_parallel.lora"),
    *("tensorrt.lora", "media", "tensorrt.media", "drawn_trees", "latent_heads", "rollouts", "alike"),
)
"""Their folders, in the order in which they are asked."""


def hooks(name: str) -> tuple[Any, ...]:
    """Hooks of that name in the parts that are there."""
    return hooks_of(__package__, PARTS, name)


def merged(name: str) -> dict[str, Any]:
    """The mappings of that name as one."""
    return merged_of(hooks(name))


def first(name: str, *given: Any) -> Any:
    """What the first part answers that has an answer; None where none has."""
    return next((answer for hook in hooks(name) if (answer := hook(*given)) is not None), None)


def runs_engines() -> bool:
    """Whether a part runs engine directories."""
    return bool(hooks("open_drafter"))
