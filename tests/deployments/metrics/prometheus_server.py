"""A real Prometheus over one server, as Debian's package installs it, and the queries of a Grafana dashboard."""

import contextlib
import json
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import httpx

BINARY = shutil.which("prometheus")
"""None where the package is not installed."""
SCRAPE_S = 1
START_S = 30.0
STOP_S = 20.0
RATE_INTERVAL_S = 15
"""Value of a dashboard's `$__rate_interval`, in seconds."""
DASHBOARD = Path(__file__).resolve().parents[3] / "examples" / "grafana.json"


def dashboard_queries(dashboard: Path = DASHBOARD) -> list[str]:
    """Expressions of all panels, with every variable at "All"."""
    panels = json.loads(dashboard.read_text(encoding="utf-8"))["panels"]
    values = {"$model_name": ".*", "$engine": ".*", "$__rate_interval": f"{RATE_INTERVAL_S}s"}
    variable = re.compile("|".join(map(re.escape, values)))
    expressions = (target["expr"] for panel in panels for target in panel.get("targets", ()))
    return [variable.sub(lambda found: values[found[0]], expression) for expression in expressions]


class Prometheus:
    """Scrapes a server every second into a folder of its own; use as a context manager.

    Args:
        target: host and port of the server.
        port: a free port of 127.0.0.1 for its API.
        path: of the server's metrics.
        rules: file of alerting rules, evaluated every second.
    """

    def __init__(self, target: str, port: int, path: str = "/metrics", rules: Path | None = None) -> None:
        self._target = target
        self._path, self._rules = path, rules
        self._address = f"127.0.0.1:{port}"
        self._folder = Path(tempfile.mkdtemp(prefix="prometheus"))
        self._client = httpx.Client(base_url=f"http://{self._address}", timeout=START_S, trust_env=False)
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Self:
        """Returns once its API answers.

        Raises:
            RuntimeError: the program is not installed, has ended or does not answer.
        """
        if BINARY is None:
            raise RuntimeError("prometheus is not installed: apt-get install prometheus")
        config = self._folder / "prometheus.yml"
        scrape = {"job_name": "wingbeat", "metrics_path": self._path, "static_configs": [{"targets": [self._target]}]}
        times = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_S}s")
        whole = {"global": times, "scrape_configs": [scrape], "rule_files": [str(self._rules)] if self._rules else []}
        # JSON is YAML.
        config.write_text(json.dumps(whole), encoding="utf-8")
        command = [BINARY, f"--config.file={config}", f"--storage.tsdb.path={self._folder / 'data'}"]
        command += [f"--web.listen-address={self._address}", "--log.level=warn"]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        """Ends the program and removes its folder."""
        self._client.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(STOP_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Series of an expression now; raises httpx.HTTPStatusError for an expression that Prometheus cannot read."""
        answer = self._client.get("/api/v1/query", params={"query": expression})
        return answer.raise_for_status().json()["data"]["result"]

    def fired(self) -> set[str]:
        """Names of the alerts that have fired at any time."""
        series = self.query('max_over_time(ALERTS{alertstate="firing"}[1d])')
        return {one["metric"]["alertname"] for one in series}

    def names(self) -> set[str]:
        """Names of the lines that were stored."""
        return {series["metric"]["__name__"] for series in self.query('{job="wingbeat"}')}

    def last_error(self) -> str:
        """Why the last scrape failed; empty where it did not."""
        (target,) = self._client.get("/api/v1/targets").raise_for_status().json()["data"]["activeTargets"]
        return target["lastError"]

    def empty(self, queries: list[str]) -> list[str]:
        """Queries that have no series at all."""
        return [expression for expression in queries if not self.query(expression)]

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if self._client.get("/-/ready").is_success:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"prometheus did not start: {(self._folder / 'log').read_text(encoding='utf-8')[-500:]}")
