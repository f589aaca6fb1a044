"""Advice of `wingbeat inspect MODEL --advise`: which drafters exist for a model, and what a draft head would gain.

Draft heads are searched for in the model's own checkpoint, among the heads that come with Wingbeat, and by name
patterns on the Hugging Face hub. Expected speeds are computed from the bytes that a round reads and the GPU's measured
copy rate; no weights are loaded or downloaded.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table

from wingbeat.deployments.doctor.rounds import bytes_of_a_round, copy_rate
from wingbeat.runtime.hub import HubName, checkpoint_folder
from wingbeat.runtime.hugging_face import build_model, read_config
from wingbeat.runtime.parts import first_result

KINDS_BY_NAME = (
    (r"eagle-?3", "EAGLE-3"),
    (r"eagle", "EAGLE"),
    (r"d-?flash", "DFlash"),
    (r"d-?spark", "DSpark"),
    (r"jet-?spec", "JetSpec"),
    (r"p-?eagle|parallel-?eagle", "P-EAGLE"),
    (r"speculator", "speculator"),
)
"""Patterns of the names of repositories on the hub; each with the kind of head that such a repository usually contains.
The first pattern that matches a name decides.
"""
MOST_REPOSITORIES, MOST_ASKED = 8, 200
HUB_S = 10.0
LENGTHS = (1.5, 2.5, 3.5)
"""Acceptance lengths, in tokens per round, for which speeds are computed."""
NUM_DRAFTED = 5
DTYPE = torch.bfloat16
"""Dtype that is assumed for draft heads, and for models that are not quantised."""
HEAD_VOCABULARY = 32_000
"""Number of tokens of a usual draft vocabulary."""


class Head(NamedTuple):
    """A drafter that is available for a model."""

    drafter: str
    """Value of `--drafter`."""
    kind: str
    found: str
    """Where the drafter was found, as text for display."""


class Expectation(NamedTuple):
    """Expected speeds of a single request on a GPU, if each round takes as long as it takes to read the weights."""

    round_bytes: int
    head_bytes: int
    over_plain: dict[str, float]
    """For each acceptance length, the speed relative to plain decoding."""
    device: str | None
    plain_tokens_per_s: float | None
    """Tokens per second of plain decoding, computed from the device's copy rate; None without a GPU."""


def advise(source: str | Path, device: torch.device) -> dict[str, Any]:
    """Return the drafters that exist for a model, and the speeds to expect.

    Args:
        source: folder, GGUF file, or name on the hub.

    Raises:
        ModelCheckpointError, ValueError, OSError: the configuration cannot be read.
    """
    folder = checkpoint_folder(source, with_weights=False)
    repositories, problem = hub_heads(HubName.parse(source), folder)
    heads = [*_own_heads(source, folder), *repositories, Head("suffix", "earlier text", "needs no weights")]
    return {
        "model": str(source),
        "heads": [head._asdict() for head in heads],
        "hub": problem,
        "expected": expectation(folder, device)._asdict(),
    }


def _own_heads(source: str | Path, folder: Path) -> Iterator[Head]:
    """Yield the drafters that need no download: prediction modules in the model's checkpoint, and the head that comes
    with Wingbeat.
    """
    config = read_config(folder).get_text_config()
    modules = [name for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if getattr(config, name, 0)]
    if modules:
        yield Head(
            "mtp", "prediction modules", f"in the checkpoint ({modules[0]} of its config), unless a copy left them out"
        )
    if (own := first_result("own_head", Path(source))) is not None:
        yield Head("auto", "EAGLE-3", f"comes with Wingbeat: {own}")


def hub_heads(name: HubName | None, folder: Path) -> tuple[list[Head], str | None]:
    """Search the hub for repositories whose names look like a draft head for this model; the most downloaded come
    first.

    Returns:
        the heads, and the reason why the hub could not be searched, or None.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    model = name.name if name is not None else getattr(read_config(folder), "_name_or_path", "") or folder.name
    model = re.sub(r"-(gguf|awq|gptq|fp8|int4|q\d\w*)$", "", Path(model).name, flags=re.I)
    if constants.HF_HUB_OFFLINE:
        return [], "HF_HUB_OFFLINE is set: the hub was not asked"
    try:
        answer = get_session().get(
            f"{constants.ENDPOINT}/api/models",
            params={"search": model, "sort": "downloads", "limit": str(MOST_ASKED)},
            timeout=HUB_S,
        )
        answer.raise_for_status()
        found = [(str(one["id"]), int(one.get("downloads") or 0)) for one in answer.json()]
    except Exception as error:  # the HTTP library's without a network, or an answer that is no list of repositories
        return [], f"the hub cannot be searched: {type(error).__name__}"
    heads = []
    for name_there, downloads in found:
        kind = next((kind for pattern, kind in KINDS_BY_NAME if re.search(pattern, name_there, re.I)), None)
        if kind is not None:
            heads.append(Head(name_there, kind, f"on the hub, {downloads:,} downloads, by its name alone"))
    return heads[:MOST_REPOSITORIES], None


def expectation(folder: Path, device: torch.device) -> Expectation:
    """Compute speeds from the bytes that a round reads. A round reads the model's weights once, and the head's weights
    once for each level of the draft tree.
    """
    config = read_config(folder)
    with torch.device("meta"):
        model = build_model(config, dtype=DTYPE)
    text = config.get_text_config()
    layer = next(module for name, module in model.named_modules() if re.fullmatch(r".*layers\.0", name))
    in_layer = sum(parameter.numel() for parameter in layer.parameters())
    width, vocabulary = text.hidden_size, min(text.vocab_size, HEAD_VOCABULARY)
    head_bytes = (in_layer + 4 * width**2 + vocabulary * width) * DTYPE.itemsize
    round_bytes = _packed_bytes(folder, config) or bytes_of_a_round(model)
    cost = 1 + NUM_DRAFTED * head_bytes / round_bytes
    over_plain = {str(length): length / cost for length in LENGTHS}
    if device.type != "cuda":
        return Expectation(round_bytes, head_bytes, over_plain, None, None)
    rate = copy_rate(device, round_bytes)
    return Expectation(round_bytes, head_bytes, over_plain, str(device), rate / round_bytes)


def _packed_bytes(folder: Path, config: Any) -> int | None:
    """Return the bytes of a model's quantised weights; None if the weights are not quantised, or if the files are not
    on this machine.
    """
    quantised = getattr(config, "quantization_config", None) is not None
    names = ("*.gguf", "*.safetensors") if quantised else ()
    return sum(file.stat().st_size for name in names for file in folder.glob(name)) or None


def advice_tables(found: dict[str, Any]) -> Iterator[Table]:
    """Yield the table of drafters, then the table of speeds."""
    heads = Table("--drafter", "kind", "where", title=f"Drafters for {found['model']}", caption=found["hub"])
    for head in found["heads"]:
        heads.add_row(*head.values())
    yield heads
    expected = found["expected"]
    plain, device = expected["plain_tokens_per_s"], expected["device"]
    speeds = Table(
        "tokens per draft",
        "over plain",
        *(() if plain is None else ("tokens/s",)),
        title=f"One request at once on {device or 'a GPU'}, by the bytes of a round",
        caption=f"a round reads {expected['round_bytes'] / 1e6:,.0f} MB, a head of one layer "
        f"{expected['head_bytes'] / 1e6:,.0f} MB at each of {NUM_DRAFTED} levels; `wingbeat bench` measures",
    )
    for length, ratio in {"plain": 1.0, **expected["over_plain"]}.items():
        speeds.add_row(length, f"{ratio:.2f}", *(() if plain is None else (f"{plain * ratio:,.0f}",)))
    yield speeds
