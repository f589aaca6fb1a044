"""Rules for a 200's token details: log-probabilities, ids, why a choice ended, and what the text must match."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .contract import GOOD_GRAMMARS, SCHEMA, VOCAB_SIZE

OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")
"""In a choice of completions, beside the choices of a chat."""


@dataclass
class Details:
    """Token details of a choice; a stream's chunks are joined."""

    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """The field's values that were not null, in order."""
    token_ids: list[int] | None = None
    prompt_token_ids: list[list[int]] = field(default_factory=list)
    prompt_logprobs: list[list[Any]] = field(default_factory=list)
    stop_reason: str | int | None = None


def collect(choices: Iterable[dict[str, Any]]) -> dict[int, Details]:
    """By index, of the choices of a whole answer or of a stream's chunks."""
    found: dict[int, Details] = {}
    for choice in choices:
        mine = found.setdefault(choice["index"], Details())
        if choice.get("logprobs") is not None:
            mine.logprobs.append(choice["logprobs"])
        if choice.get("token_ids") is not None:
            mine.token_ids = (mine.token_ids or []) + choice["token_ids"]
        for name in OF_PROMPT:
            if choice.get(name) is not None:
                getattr(mine, name).append(choice[name])
        if choice["finish_reason"] is not None:
            mine.stop_reason = choice["stop_reason"]
    return found


def add_prompts(details: Iterable[Details], parts: Iterable[dict[str, Any]], is_chat: bool) -> None:
    """Add the prompt's details in a chat's answer or its chunks to each choice."""
    found = [(name, part[name]) for part in parts for name in OF_PROMPT if part.get(name) is not None]
    for mine in details if is_chat else ():
        for name, value in found:
            getattr(mine, name).append(value)


def problem_of(body: dict[str, Any], is_chat: bool, found: Details, text: str, finish_reason: str) -> str | None:
    """Description of the first error in a choice; `text` comes without the echoed prompt."""
    for check in (_ids, _logprobs, _prompt_logprobs, _stop_reason, _form):
        problem = check(body, is_chat, found, text, finish_reason)
        if problem is not None:
            return problem
    return None


def _ids(body: dict[str, Any], is_chat: bool, found: Details, text: str, finish_reason: str) -> str | None:
    wanted = bool(body.get("return_token_ids"))
    if (found.token_ids is not None) != wanted or len(found.prompt_token_ids) != wanted:
        return f"token ids {found.token_ids}, of the prompt {found.prompt_token_ids}"
    allowed = set(body.get("allowed_token_ids") or range(VOCAB_SIZE))
    if wanted and not (set(found.token_ids) <= allowed or _has_grammar(body)):
        return f"tokens {set(found.token_ids) - allowed} are not among the allowed ones"
    return None


def _logprobs(body: dict[str, Any], is_chat: bool, found: Details, text: str, finish_reason: str) -> str | None:
    asked = body.get("logprobs")
    asked = None if asked is False else asked
    if asked is None:
        return f"log-probabilities that nobody asked for: {found.logprobs}" if found.logprobs else None
    if is_chat:
        return _chat_logprobs(body, found)
    lists = {
        name: [item for part in found.logprobs for item in part[name]]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    tokens, values, top = lists["tokens"], lists["token_logprobs"], lists["top_logprobs"]
    if len({len(entries) for entries in lists.values()}) != 1 or not tokens:
        return f"lists of different lengths: {lists}"
    num_echoed = len(found.prompt_token_ids[0]) if body.get("echo") and found.prompt_token_ids else 0
    if found.token_ids is not None and len(tokens) != num_echoed + len(found.token_ids):
        return f"{len(tokens)} entries for {num_echoed} + {len(found.token_ids)} tokens"
    if body.get("echo"):
        if (values[0], top[0]) != (None, None):
            return f"the prompt's first token has {values[0]}"
        tokens, values, top = tokens[1:], values[1:], top[1:]
    if not all(_is_logprob(value) for value in values):
        return f"log-probabilities {values}"
    for token, value, best in zip(tokens, values, top, strict=True):
        if not 1 <= len(best) <= asked + 1 or best.get(token) != value or not all(map(_is_logprob, best.values())):
            return f"top_logprobs {best} of {token!r} at {value}"
    return _offsets(body, lists)


def _offsets(body: dict[str, Any], lists: dict[str, list[Any]]) -> str | None:
    tokens, offsets = lists["tokens"], lists["text_offset"]
    if body.get("return_tokens_as_token_ids"):
        is_named = all(re.fullmatch(r"token_id:\d+", token) for token in tokens)
        return None if is_named and offsets == sorted(offsets) else f"names {tokens} at {offsets}"
    if not _counts_whole_characters(tokens, offsets):
        return f"offsets {offsets} of {tokens}"
    return None


def _counts_whole_characters(tokens: list[str], offsets: list[int]) -> bool:
    """Whether offsets are those of the tokens' characters, as far as names tell.

    A token that is a part of a character is named by U+FFFD: it completes one, or leaves that to those behind it.
    """
    num_open = 0
    for token, offset, following in zip(tokens, offsets, offsets[1:], strict=False):
        num_parts = token.count("\ufffd")
        num_completed = following - offset - (len(token) - num_parts)
        if not 0 <= num_completed <= num_open + num_parts:
            return False
        # A token without text ends no character that others have begun.
        num_open = num_open + num_parts - num_completed if num_parts or not token else 0
    return not offsets or offsets[0] == 0


def _chat_logprobs(body: dict[str, Any], found: Details) -> str | None:
    entries = [entry for part in found.logprobs for entry in part["content"]]
    if not entries or (found.token_ids is not None and len(entries) != len(found.token_ids)):
        return f"{len(entries)} entries for {found.token_ids}"
    for entry in entries:
        values = [item["logprob"] for item in entry["top_logprobs"]]
        if len(values) != (body.get("top_logprobs") or 0) or values != sorted(values, reverse=True):
            return f"top_logprobs {values}"
        if not all(map(_is_logprob, (entry["logprob"], *values))):
            return f"log-probabilities {entry['logprob']}, {values}"
        if any(not 0 <= byte < 256 for byte in entry["bytes"]):
            return f"bytes {entry['bytes']}"
    return None


def _prompt_logprobs(body: dict[str, Any], is_chat: bool, found: Details, text: str, finish_reason: str) -> str | None:
    asked = body.get("prompt_logprobs")
    if len(found.prompt_logprobs) != (asked is not None):
        return f"{len(found.prompt_logprobs)} prompt_logprobs, asked for {asked}"
    if asked is None:
        return None
    (entries,) = found.prompt_logprobs
    if entries[0] is not None or (found.prompt_token_ids and len(entries) != len(found.prompt_token_ids[0])):
        return f"{len(entries)} prompt_logprobs, the first one {entries[0]}"
    for entry in entries[1:]:
        if not 1 <= len(entry) <= asked + 1 or not all(_is_logprob(item["logprob"]) for item in entry.values()):
            return f"prompt_logprobs {entry}"
    return None


def _stop_reason(body: dict[str, Any], is_chat: bool, found: Details, text: str, finish_reason: str) -> str | None:
    stops = stops_of(body)
    reason = found.stop_reason
    if reason is not None and (finish_reason != "stop" or reason not in (*stops, *(body.get("stop_token_ids") or ()))):
        return f"stop_reason {reason!r} of a choice that ended by {finish_reason}"
    if isinstance(reason, str) and text.endswith(reason) != bool(body.get("include_stop_str_in_output")):
        return f"the text {text[-80:]!r} was ended by {reason!r}"
    if isinstance(reason, int) and found.token_ids is not None and found.token_ids[-1:] != [reason]:
        return f"stop_reason {reason}, and tokens {found.token_ids}"
    return None


def stops_of(body: dict[str, Any]) -> list[str]:
    """The stop strings."""
    return [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []


def _has_grammar(body: dict[str, Any]) -> bool:
    form = body.get("response_format")
    return body.get("structured_outputs") is not None or (form is not None and form["type"] != "text")


def _form(body: dict[str, Any], is_chat: bool, found: Details, text: str, finish_reason: str) -> str | None:
    """A text that ended by itself is what its grammar says."""
    ended = finish_reason == "stop" and found.stop_reason is None and not stops_of(body)
    if not ended or not _has_grammar(body) or body.get("skip_special_tokens") is False:
        return None
    form = body.get("response_format") or {}
    structured = body.get("structured_outputs") or {"json_object": True}
    if form.get("type") == "json_schema":
        structured = {"json": form["json_schema"]["schema"]}
    if form.get("type") == "structural_tag":
        return None
    # A character that the prompt's last token left unfinished does not belong to the answer.
    text = text.lstrip("\ufffd")
    return None if _matches(structured, text) else f"{text!r} does not match {structured}"


def _matches(structured: dict[str, Any], text: str) -> bool:
    if "choice" in structured:
        return text in structured["choice"]
    if "regex" in structured:
        return structured not in GOOD_GRAMMARS or re.fullmatch(structured["regex"], text) is not None
    if "json_object" in structured or structured.get("json") == SCHEMA:
        value = json.loads(text)
        return isinstance(value, dict) and ("json_object" in structured or isinstance(value["a"], int))
    if "json" in structured:
        value = json.loads(text)
        return structured not in GOOD_GRAMMARS or value in ("on", "off", 3)
    return True


def _is_logprob(value: Any) -> bool:
    return isinstance(value, float | int) and math.isfinite(value) and value <= 1e-6
