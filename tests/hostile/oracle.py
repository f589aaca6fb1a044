"""From a request to the answers that docs/http_api.md allows, in the document's own order of rules."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from tests.optional import FEATURES, is_deleted

from .answer_sizes import check_size
from .case import Case
from .contract import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    HEALTH,
    KEY,
    MAX_BODY_BYTES,
    MAX_DEPTH,
    METRICS,
    MODEL,
    MODELS,
    VOCAB_SIZE,
)
from .findings import Findings, Outcome
from .json_reading import InvalidJson, read_json
from .rules import as_prompts, changes_template, judge_fields

LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:(\d+))?")
LONGEST_TOKEN_CHARS = 64
"""No token of the demo model is longer."""
DEFAULT_MAX_TOKENS = 16


class Counter(Protocol):
    """The served model's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a prompt that was given by its tokens."""
        ...


@dataclass
class Verdict:
    """Answers that a request may get."""

    outcomes: set[Outcome] = field(default_factory=set)
    statuses: set[int] = field(default_factory=set)
    """Good ones; empty where an error is demanded."""
    body: dict[str, Any] | None = None
    """Body of a generation that may be answered."""
    num_prompt_tokens: int | None = None
    """Tokens of all prompts together; None if the document does not fix the number."""
    echoes: list[str] = field(default_factory=list)
    """Beginning of each choice's text, by prompt."""
    request_id: str | None = None
    """Request id that every answer must carry."""
    origin: str | None = None
    """Origin that the answer must allow."""

    def fail(self, *outcomes: Outcome) -> "Verdict":
        """An error is demanded."""
        self.outcomes |= set(outcomes)
        self.statuses = set()
        return self


def judge(case: Case, counter: Counter) -> Verdict:
    """The verdict on a request, rule by rule in the document's order."""
    verdict = Verdict()
    path = unquote(case.target.split("?")[0].split("#")[0])
    preflight = case.method == "OPTIONS" and None not in map(case.header, ("Origin", "Access-Control-Request-Method"))
    unknown, methods = _path(case, path)
    if unknown and not preflight:
        return verdict.fail(*unknown)
    verdict.outcomes |= unknown
    if case.method not in methods and not preflight:
        return verdict.fail(Outcome(405, "method_not_allowed"))
    if not _host(case.header("Host") or "", verdict) or not _origin(case, verdict):
        return verdict.fail()
    if preflight:
        verdict.statuses = {204}
        return verdict
    if path.startswith("/v1") and not _key(case.header("Authorization"), verdict):
        return verdict.fail()
    if not _request_id(case.header("X-Request-Id"), verdict):
        return verdict.fail()
    verdict.statuses = {200}
    if case.method != "POST":
        return verdict
    if not _media_type(case.header("Content-Type"), verdict):
        return verdict.fail()
    if len(case.body or b"") > MAX_BODY_BYTES:
        return verdict.fail(Outcome(413, "body_too_large"))
    return _body(path, case.body or b"", verdict, counter)


HAS_PAGE = not is_deleted(FEATURES["page"])
DESCRIBED = () if is_deleted(FEATURES["description"]) else ("/docs", "/openapi.json")


def _path(case: Case, path: str) -> tuple[set[Outcome], tuple[str, ...]]:
    """Errors that a path may cause, and its methods."""
    unknown = Outcome(404, "unknown_url")
    if path in (COMPLETIONS, CHAT):
        return set(), ("POST",)
    if path == HEALTH:
        return set(), ("GET", "HEAD")
    if path in (*DESCRIBED, METRICS, MODELS, f"{MODELS}/{MODEL}") or (path == "/" and HAS_PAGE):
        return set(), ("GET",)
    if path.startswith(f"{MODELS}/"):
        # An unknown model may be noticed before or after the rules that follow the path's.
        late = {Outcome(401, "invalid_api_key"), Outcome(403, "host_not_allowed"), Outcome(403, "origin_not_allowed")}
        late |= {Outcome(400, "invalid_header", param) for param in (None, "X-Request-Id")}
        method = {Outcome(405, "method_not_allowed")} if case.method != "GET" else set()
        return {unknown, Outcome(404, "model_not_found", "model"), *late, *method}, ("GET",)
    return {unknown}, ()


def _host(host: str, verdict: Verdict) -> bool:
    found = LOOPBACK.fullmatch(host)
    if found and int(found[3] or 0) < 2**16:
        return True
    verdict.outcomes.add(Outcome(403, "host_not_allowed"))
    return bool(LOOPBACK.fullmatch(host.lower().replace(".:", ":").removesuffix(".")))


def _origin(case: Case, verdict: Verdict) -> bool:
    origin = case.header("Origin")
    if origin is None:
        return True
    if LOOPBACK.fullmatch(origin.removeprefix("http://")) and origin.startswith("http://"):
        verdict.origin = origin
        return True
    verdict.outcomes.add(Outcome(403, "origin_not_allowed"))
    try:
        parts = urlsplit(origin.lower())
    except ValueError:
        return False
    # Another spelling or scheme of a host that is taken is left open.
    return bool(LOOPBACK.fullmatch(parts.netloc)) and parts.scheme in ("http", "https") and not parts.fragment


def _key(given: str | None, verdict: Verdict) -> bool:
    if given == f"Bearer {KEY}":
        return True
    verdict.outcomes.add(Outcome(401, "invalid_api_key"))
    # HTTP's schemes have no case, and any number of spaces may follow.
    scheme, _, key = (given or "").partition(" ")
    return scheme.lower() == "bearer" and key.strip() == KEY


def _request_id(given: str | None, verdict: Verdict) -> bool:
    if given is None:
        return True
    if re.fullmatch(r"[!-~]{1,128}", given):
        verdict.request_id = given
        return True
    verdict.outcomes |= {Outcome(400, "invalid_header", param) for param in (None, "X-Request-Id")}
    return bool(re.fullmatch(r"[ -~]{1,128}", given))


def _media_type(given: str | None, verdict: Verdict) -> bool:
    essence = (given or "").partition(";")[0]
    if essence == "application/json":
        return True
    verdict.outcomes.add(Outcome(415, "unsupported_media_type"))
    return essence.strip().lower() == "application/json"


def _body(path: str, body: bytes, verdict: Verdict, counter: Counter) -> Verdict:
    invalid = Outcome(400, "invalid_json")
    try:
        reading = read_json(body, MAX_DEPTH)
    except InvalidJson:
        return verdict.fail(invalid)
    if not isinstance(reading.value, dict):
        return verdict.fail(invalid)
    if reading.doubts:
        verdict.outcomes.add(invalid)
    found = judge_fields(path, reading.value)
    if not found.must_fail:
        verdict.num_prompt_tokens = _fit(path, reading.value, found, counter)
    if not found.must_fail:
        check_size(path, reading.value, verdict.num_prompt_tokens, found)
    verdict.outcomes |= found.outcomes
    if found.must_fail:
        return verdict.fail()
    verdict.body = reading.value
    if path == COMPLETIONS:
        prompts = as_prompts(reading.value["prompt"]) or []
        texts = [_echo(prompt, reading.value, counter) for prompt in prompts]
        verdict.echoes = texts if reading.value.get("echo") else [""] * len(texts)
    return verdict


def _echo(prompt: str | list[int], body: dict[str, Any], counter: Counter) -> str:
    """A prompt as an answer repeats it: what is left of it, given back by its tokens where something was cut off."""
    kept = num_kept(body)
    if kept is None and isinstance(prompt, str):
        return prompt
    token_ids = counter.encode(prompt) if isinstance(prompt, str) else prompt
    if kept is not None and len(token_ids) <= kept and isinstance(prompt, str):
        return prompt
    # The answer may complete a character that is cut.
    return counter.decode(token_ids[max(0, len(token_ids) - kept) if kept else 0 :]).rstrip("\ufffd")


def num_kept(body: dict[str, Any]) -> int | None:
    """Tokens of a prompt that count at most; None counts all."""
    kept = body.get("truncate_prompt_tokens")
    if kept == -1:
        return int(max(1, CONTEXT - (body.get("max_completion_tokens") or body.get("max_tokens") or 1)))
    return None if kept is None else int(kept)


def _fit(path: str, body: dict[str, Any], found: Findings, counter: Counter) -> int | None:
    """Whether prompts hold known tokens and fit with their answers; the tokens of all prompts together."""
    if path == CHAT:
        if changes_template(body):
            found.open("messages", "context_length_exceeded")
            return None
        contents = [message.get("content") or "" for message in body["messages"]]
        # The separator of parts is not fixed; up to a token or two, parts are as long as lines.
        texts = [text if isinstance(text, str) else "\n".join(part["text"] for part in text) for text in contents]
        lines = [
            {"role": message["role"], "content": text} for message, text in zip(body["messages"], texts, strict=True)
        ]
        num_tokens = _check_lengths([len(counter.encode_chat(lines))], body, "messages", found, None)
        return num_tokens if texts == contents and not body.get("add_special_tokens") else None
    lengths = []
    for prompt in as_prompts(body["prompt"]) or []:
        if isinstance(prompt, str):
            lengths.append(len(prompt) if len(prompt) > CONTEXT * LONGEST_TOKEN_CHARS else len(counter.encode(prompt)))
        else:
            lengths.append(len(prompt))
            kept = num_kept(body)
            # Tokens that are cut off are not checked.
            if not all(0 <= token_id < VOCAB_SIZE for token_id in (prompt[-kept:] if kept else prompt)):
                found.wrong("prompt")
    num_tokens = _check_lengths(lengths, body, "prompt", found, DEFAULT_MAX_TOKENS)
    return None if body.get("add_special_tokens") is False else num_tokens


def _check_lengths(
    lengths: list[int], body: dict[str, Any], text_field: str, found: Findings, default: int | None
) -> int:
    # Completions know one name of the limit, and ignore the other.
    has_other = text_field == "messages" and body.get("max_completion_tokens") is not None
    limit = "max_completion_tokens" if has_other else "max_tokens"
    kept = num_kept(body)
    if kept is not None:
        lengths = [min(kept, length) for length in lengths]
    if not all(lengths):
        found.wrong(text_field)
    asked, longest = body.get(limit), max(lengths)
    for field_name in (text_field, limit):
        if longest >= CONTEXT or (asked is not None and longest + asked > CONTEXT):
            found.wrong(field_name, "context_length_exceeded")
        elif asked is None and default is not None and longest + default > CONTEXT:
            found.open(field_name, "context_length_exceeded")
    return sum(lengths)
