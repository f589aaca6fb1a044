"""The alerting rules of `examples/alerts.yaml`, and Prometheus' own tool for them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

PROMTOOL = shutil.which("promtool")
"""None where Debian's package `prometheus` is not installed."""
FILE = Path(__file__).parents[3] / "examples" / "alerts.yaml"
MINUTES = re.compile(r"\b(\d+)m\b")
TOOL_S = 60.0


def rules() -> list[dict[str, Any]]:
    """Every rule."""
    (group,) = yaml.safe_load(FILE.read_text(encoding="utf-8"))["groups"]
    return group["rules"]


def in_seconds(folder: Path) -> Path:
    """A copy of the rules in which every minute is a second: an hour of load takes a minute."""
    copy = folder / FILE.name
    copy.write_text(MINUTES.sub(r"\1s", FILE.read_text(encoding="utf-8")), encoding="utf-8")
    return copy


def promtool(*words: str | Path) -> None:
    """Run the tool; raises AssertionError with its output where it fails."""
    done = subprocess.run([PROMTOOL, *map(str, words)], check=False, capture_output=True, text=True, timeout=TOOL_S)
    assert done.returncode == 0, done.stdout + done.stderr


def check_firing(series: dict[str, str], at: str, firing: list[str], folder: Path) -> None:
    """Have `promtool test rules` prove that exactly these alerts fire.

    Args:
        series: by name with labels, one value a minute in Prometheus' notation.
        at: time, such as 30m.
    """
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    asked = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": samples}
    given = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": given, "promql_expr_test": [asked]}
    cases = folder / "cases.yaml"
    # JSON is YAML.
    cases.write_text(json.dumps({"rule_files": [str(FILE)], "evaluation_interval": "1m", "tests": [test]}))
    promtool("test", "rules", cases)
