"""Settings of the HTTP API: keys, hosts, size limits and logging."""

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, SecretStr, field_validator

from wingbeat.deployments.host_names import host_name, origin_name
from wingbeat.deployments.limits import MAX_ANSWER_BYTES, MAX_BODY_BYTES
from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.deployments.options.words import listed

API_KEY_VARIABLE = "WINGBEAT_API_KEY"
OF_REQUESTS = "request"
"""Value of `chat_template` that permits a template in each request."""
OPERATOR_KEY_VARIABLE = "WINGBEAT_OPERATOR_KEY"


class SurfaceOptions(ModelOptions):
    """Settings of `AppConfig` that routers use."""

    # The input is hidden in errors, because pydantic's error text would contain the whole input, including the API
    # keys.
    model_config = ConfigDict(hide_input_in_errors=True)

    max_body_bytes: int = Field(
        MAX_BODY_BYTES, ge=1, description="Maximum size of a request body in bytes. Longer bodies are answered by 413."
    )
    max_answer_bytes: int = Field(
        MAX_ANSWER_BYTES,
        ge=1,
        description="Maximum bytes that log-probabilities, token ids, traces and embeddings may add to one answer; "
        "requests that could exceed it are refused. A router may hold four such answers at once.",
    )
    api_key: tuple[SecretStr, ...] | None = Field(
        default_factory=lambda: os.environ.get(API_KEY_VARIABLE) or None,
        validate_default=True,
        description="Keys separated by commas; clients must send one of them as a Bearer token. By default read "
        f"from the environment variable {API_KEY_VARIABLE}. If there are no keys, requests need no key.",
    )
    operator_key: tuple[SecretStr, ...] | None = Field(
        default_factory=lambda: os.environ.get(OPERATOR_KEY_VARIABLE) or None,
        validate_default=True,
        description="Keys separated by commas; operators must send one of them as a Bearer token for /trace, "
        "/reset_prefix_cache, /v1/prefixes, /v1/drafter/..., weight updates, rollouts and loading of "
        f"adapters. By default read from the environment variable {OPERATOR_KEY_VARIABLE}.",
    )
    access_log: bool = Field(
        False,
        description="Log one line per request: id, path, status and time. Requests to /health, /ping, /load and "
        "/metrics are logged only if they fail.",
    )
    allowed_hosts: tuple[str, ...] | None = Field(
        None,
        description="Accepted Host headers separated by commas, or '*' for any. By default only local names if the "
        "server listens on a local address, and any name otherwise.",
    )
    allowed_origins: tuple[str, ...] | None = Field(
        None,
        description="Accepted Origin headers (origins of web pages) separated by commas, or '*' for any. By default "
        "only local origins if the server listens on a local address.",
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="Handling of request fields that have no meaning here: 'ignore' leaves them out and names them in"
        " the response header X-Wingbeat-Ignored-Fields and in the log; 'refuse' answers 400.",
    )
    chat_template: str | None = Field(
        None,
        description="File with a Jinja chat template that replaces the model's template; a router reads the file "
        f"when it starts. The value {OF_REQUESTS!r} instead permits a chat request to bring its own template as "
        "`chat_template`, which is run with limits of time and memory. By default the model's template.",
    )

    @field_validator("api_key", "operator_key", "allowed_hosts", "allowed_origins", mode="before")
    @classmethod
    def _split_by_commas(cls, value: Any) -> Any:
        return listed(value)

    @field_validator("api_key", "operator_key")
    @classmethod
    def _check_keys(cls, keys: tuple[SecretStr, ...] | None) -> tuple[SecretStr, ...] | None:
        for key in keys or ():
            text = key.get_secret_value()
            if not (text and text.isascii() and text.isprintable() and " " not in text):
                raise ValueError("holds a key that is empty or has a character that an HTTP header cannot carry")
        return keys

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if hosts is None else tuple(map(host_name, hosts))

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, origins: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return None if origins is None else tuple(map(origin_name, origins))

    @field_validator("chat_template")
    @classmethod
    def _check_template(cls, value: str | None) -> str | None:
        if value not in (None, OF_REQUESTS) and not Path(value).is_file():
            raise ValueError(f"there is no such file; give one, or {OF_REQUESTS!r}")
        return value

    def own_template(self) -> str | None:
        """Returns the text of the file that `chat_template` names. Returns None if the setting names no file, so that
        the model's own template is used.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        if self.chat_template in (None, OF_REQUESTS):
            return None
        return Path(self.chat_template).read_text(encoding="utf-8")
