"""Settings of the HTTP surface: who may use it, and what it logs."""

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
"""In the place of a chat template's file: requests may have one."""
OPERATOR_KEY_VARIABLE = "WINGBEAT_OPERATOR_KEY"


class SurfaceOptions(ModelOptions):
    """The part of `AppConfig` that routers go by."""

    # An error's input would show the key beside the field that is wrong.
    model_config = ConfigDict(hide_input_in_errors=True)

    max_body_bytes: int = Field(MAX_BODY_BYTES, ge=1, description="Longest request body.")
    max_answer_bytes: int = Field(
        MAX_ANSWER_BYTES,
        ge=1,
        description="Longest that log-probabilities, token ids and traces may make an answer; a router holds four.",
    )
    api_key: tuple[SecretStr, ...] | None = Field(
        default_factory=lambda: os.environ.get(API_KEY_VARIABLE) or None,
        validate_default=True,
        description=f"Keys of which clients must send one as Bearer token; by default those in {API_KEY_VARIABLE}.",
    )
    operator_key: tuple[SecretStr, ...] | None = Field(
        default_factory=lambda: os.environ.get(OPERATOR_KEY_VARIABLE) or None,
        validate_default=True,
        description="Keys of which operators (/trace, /reset_prefix_cache, /v1/prefixes, /v1/drafter/promote) must "
        f"send one as Bearer token; by default those in {OPERATOR_KEY_VARIABLE}.",
    )
    access_log: bool = Field(False, description="Log every request: id, path, status, time.")
    allowed_hosts: tuple[str, ...] | None = Field(
        None, description="Names that Host headers may give, or '*'; by default local ones where the server is local."
    )
    allowed_origins: tuple[str, ...] | None = Field(
        None,
        description="Origins of web pages that may use it, or '*'; by default local ones where the server is local.",
    )
    unknown_fields: Literal["ignore", "refuse"] = Field(
        "ignore",
        description="What becomes of fields of a request that mean nothing here: ignored, named in the answer's header "
        "X-Wingbeat-Ignored-Fields and in the log; or answered by 400.",
    )
    chat_template: str | None = Field(
        None,
        description=f"File with a Jinja template in the place of the model's, or {OF_REQUESTS!r}: a chat request may "
        "have one of its own as `chat_template`, run within limits of time and memory.",
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
                raise ValueError("holds a key that is empty or has a character that no header can carry")
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
        """The text of a chat template in the place of the model's; None where that is used.

        Raises:
            OSError, ValueError: the file cannot be read.
        """
        if self.chat_template in (None, OF_REQUESTS):
            return None
        return Path(self.chat_template).read_text(encoding="utf-8")
