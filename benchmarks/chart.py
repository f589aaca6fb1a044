"""Draws the README's chart from the results of `packed.py`: `results/packed.json` and `results/packed_drafts.json`."""

import argparse
import json
import statistics
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

mpl.use("agg")

RESULTS = Path(__file__).parent / "results"
ENGINES = {
    "llama.cpp": "#9aa5b1",
    "OpenVINO GenAI": "#5f7a94",
    "Wingbeat": "#e8833a",
    "Wingbeat, 8-bit activations": "#b5501b",
}
LOADS = ("1", "4", "16")
DRAFTS = "1, with drafts\n(Python)"


def figures() -> dict[str, dict[str, float]]:
    """Median tokens per second by group of bars and engine."""
    plain, drafted = (
        json.loads((RESULTS / name).read_text(encoding="utf-8"))["figures"]
        for name in ("packed.json", "packed_drafts.json")
    )
    names = {"smol.gguf": "Wingbeat", "smol.gguf, int8 activations": "Wingbeat, 8-bit activations"}
    found = {
        load: {names.get(name, name): statistics.median(rows[load]) for name, rows in plain.items()} for load in LOADS
    }
    by_name = {name: statistics.median(rows["1"]) for name, rows in drafted.items()}
    found[DRAFTS] = {ours: by_name[f"{name}, drafts by suffix"] for name, ours in names.items()}
    found[DRAFTS]["llama.cpp"] = max(rate for name, rate in by_name.items() if name.startswith("llama.cpp"))
    return found


def main() -> None:
    """Draws the chart into a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path, default=Path("docs/images/real_model.png"), help="picture to write")
    options = parser.parse_args()
    groups = figures()
    _, axes = plt.subplots(figsize=(8, 3.4), dpi=130, layout="constrained")
    width = 0.2
    for place, (engine, colour) in enumerate(ENGINES.items()):
        at = [index + (place - 1.5) * width for index in range(len(groups))]
        heights = [group.get(engine, 0.0) for group in groups.values()]
        bars = axes.bar(at, heights, width * 0.92, label=engine, color=colour)
        axes.bar_label(bars, [f"{height:.0f}" if height else "" for height in heights], fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), [*groups])
    axes.set_xlabel("requests at once")
    axes.set_ylabel("tokens/s")
    axes.set_title("SmolLM2-135M-Instruct, GGUF Q4_1, two CPU threads", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    plt.savefig(options.plot)


if __name__ == "__main__":
    main()
