"""Whether an answer is one of those that the verdict allows, and whether a 200 is what it says it is."""

import json
from typing import Any, NamedTuple

from .case import Case
from .client import Answer
from .contract import CHAT, MODEL
from .findings import LIMITS
from .oracle import DEFAULT_MAX_TOKENS, Verdict
from .token_answers import Details, add_prompts, collect, problem_of, stops_of

GREEDY_BELOW = 1e-5


class Wrong(AssertionError):
    """An answer that the document does not allow."""


class Told(NamedTuple):
    """Contents of a generation, whether streamed or whole."""

    texts: list[str]
    finish_reasons: list[str]
    seed: int
    usage: dict[str, Any] | None
    """None in a stream that was not asked for it."""
    metrics: dict[str, Any] | None
    details: list[Details]


def demand(holds: bool, problem: str) -> None:
    """Raises Wrong with the problem unless it holds."""
    if not holds:
        raise Wrong(problem)


def check(case: Case, verdict: Verdict, answer: Answer) -> Told | None:
    """Raises Wrong where the answer is not allowed; what a generation told."""
    ids = answer.all("x-request-id")
    demand(len(ids) == 1, f"X-Request-Id is there {len(ids)} times")
    demand(verdict.request_id in (None, ids[0]), f"X-Request-Id is {ids[0][:200]!r}")
    if verdict.origin is not None:
        demand(answer.header("access-control-allow-origin") in (verdict.origin, "*"), "CORS header is missing")
    if answer.status in verdict.statuses:
        return _generation(case, verdict, answer) if verdict.body is not None else None
    if case.method == "HEAD":
        demand(answer.status in {outcome.status for outcome in verdict.outcomes}, f"status {answer.status} to HEAD")
        return None
    _error(verdict, answer)
    return None


def _error(verdict: Verdict, answer: Answer) -> None:
    try:
        error = json.loads(answer.body)["error"]
        code, param, message = error["code"], error["param"], error["message"]
    except (ValueError, KeyError, TypeError) as problem:
        raise Wrong(f"status {answer.status} without an error's body: {answer.body[:300]!r}") from problem
    demand(isinstance(message, str) and bool(message) and isinstance(error["type"], str), "the error has no words")
    if answer.status == 503 and verdict.statuses:
        demand(code == "engine_overloaded", f"503 with code {code}")
        demand((answer.header("retry-after") or "").isdigit(), "503 without Retry-After")
        return
    found = any(
        (answer.status, code) == (outcome.status, outcome.code) and _names(param, outcome.param)
        for outcome in verdict.outcomes
    )
    allowed = sorted(map(str, verdict.outcomes)) + sorted(map(str, verdict.statuses))
    demand(found, f"answered by {answer.status} {code} param={param!r} ({message[:200]!r}); allowed: {allowed[:12]}")
    if answer.status == 405:
        demand(bool(answer.header("allow")), "405 without Allow")
    if answer.status == 401:
        demand(bool(answer.header("www-authenticate")), "401 without WWW-Authenticate")


def _names(param: Any, field: str | None) -> bool:
    if field is None or not isinstance(param, str):
        return param is None and field is None
    # A long name may be cut, a part of a field may be named with it.
    start = param.removesuffix("...")
    is_cut = len(start) > 30 and field.startswith(start)
    return param == field or param.startswith((f"{field}.", f"{field}[")) or is_cut


def _generation(case: Case, verdict: Verdict, answer: Answer) -> Told:
    demand(answer.complete, "the answer was cut off")
    body, is_chat = verdict.body, case.target.startswith(CHAT)
    told = _stream(answer, body, is_chat) if body.get("stream") else _whole(answer, is_chat)
    prompts = [""] if is_chat else verdict.echoes
    n, limit = int(body.get("n") or 1), limit_of(body, is_chat)
    demand(len(told.texts) == len(prompts) * n, f"{len(told.texts)} choices")
    demand(set(told.finish_reasons) <= {"stop", "length"}, f"finish reasons {told.finish_reasons}")
    demand(body.get("seed") in (None, told.seed), f"seed is {told.seed}")
    if told.usage is not None:
        _usage(told, verdict, len(told.texts) * limit)
    if told.metrics is not None:
        drafts = told.metrics["num_drafts"]
        demand(
            bool((body.get("speculation") or {}).get("enabled", True)) or drafts == 0, f"{drafts} drafts, none wanted"
        )
    for place, prompt in enumerate(prompts):
        mine = told.texts[place * n : (place + 1) * n]
        demand(all(text.startswith(prompt) for text in mine), "the prompt is not echoed")
        mine = [text[len(prompt) :] for text in mine]
        temperature = body.get("temperature")
        if temperature is not None and temperature < GREEDY_BELOW:
            demand(len(set(mine)) == 1, f"greedy choices differ: {mine}")
        if not body.get("min_tokens"):
            cut = [_before_stop(text, told.details[place * n + i].stop_reason) for i, text in enumerate(mine)]
            demand(not any(stop in text for stop in stops_of(body) for text in cut), "a stop string is in the text")
        for index, text in enumerate(mine, place * n):
            problem = problem_of(body, is_chat, told.details[index], text, told.finish_reasons[index])
            demand(problem is None, problem or "")
        # An echo shows what its prompt's last token left unfinished, which `echoes` leave out.
        rest = {text.lstrip("\ufffd") if body.get("echo") else text for text in mine}
        demand(bool(limit) or rest == {""}, f"nothing was to be written, and there is {mine}")
    if _goes_on(body) or not limit:
        demand(set(told.finish_reasons) == {"length"}, f"it goes on, and finish reasons {told.finish_reasons}")
    return told


def limit_of(body: dict[str, Any], is_chat: bool) -> int:
    """Tokens that a choice may have."""
    asked = [body[name] for name in LIMITS[: 2 if is_chat else 1] if body.get(name) is not None]
    return int(asked[-1]) if asked else 2**31 if is_chat else DEFAULT_MAX_TOKENS


def _before_stop(text: str, stop_reason: str | int | None) -> str:
    """The text without the last character of the stop string that it may end with."""
    return text[:-1] if isinstance(stop_reason, str) and text.endswith(stop_reason) else text


def _goes_on(body: dict[str, Any]) -> bool:
    """Whether nothing but its limit ends an answer."""
    others = ("stop", "stop_token_ids", "structured_outputs", "response_format")
    return bool(body.get("ignore_eos")) and not any(body.get(name) for name in others)


def _usage(told: Told, verdict: Verdict, most: int) -> None:
    usage = told.usage
    prompt, written = usage["prompt_tokens"], usage["completion_tokens"]
    demand(usage["total_tokens"] == prompt + written, f"usage does not add up: {usage}")
    demand(verdict.num_prompt_tokens in (None, prompt), f"{prompt} prompt tokens, not {verdict.num_prompt_tokens}")
    demand(0 <= written <= most, f"{written} tokens written, {most} allowed")
    demand(0 <= usage["prompt_tokens_details"]["cached_tokens"] <= prompt, f"cached tokens: {usage}")
    body = verdict.body
    if _goes_on(body) and any(body.get(name) is not None for name in LIMITS):
        demand(written == most, f"ignore_eos, and {written} of {most} tokens")


def _whole(answer: Answer, is_chat: bool) -> Told:
    try:
        body = json.loads(answer.body)
        choices = body["choices"]
        texts = [choice["message"]["content"] if is_chat else choice["text"] for choice in choices]
        reasons = [choice["finish_reason"] for choice in choices]
        metrics, details = body["metrics"]["speculative_decoding"], list(collect(choices).values())
        add_prompts(details, [body], is_chat)
        told = Told(texts, reasons, body["seed"], body["usage"], metrics, details)
        demand([choice["index"] for choice in choices] == list(range(len(choices))), "choices out of order")
        demand(body["object"] == ("chat.completion" if is_chat else "text_completion"), f"object {body['object']}")
        demand(body["model"] == MODEL, f"model {body['model']}")
    except (ValueError, KeyError, TypeError) as error:
        raise Wrong(f"no completion: {error!r}: {answer.body[:300]!r}") from error
    return told


def _usages(chunks: list[dict[str, Any]], options: dict[str, Any]) -> list[dict[str, Any]]:
    """The usages that a stream's chunks carry, as far as they were asked for."""
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage") is not None]
    if options.get("include_usage") and options.get("continuous_usage_stats"):
        demand(len(usages) == len(chunks), f"{len(usages)} usages in {len(chunks)} chunks")
        written = [usage["completion_tokens"] for usage in usages]
        demand(written == sorted(written), f"tokens so far: {written}")
    else:
        demand(len(usages) == bool(options.get("include_usage")), f"{len(usages)} usages, asked: {options}")
    demand(bool(chunks[-1]["choices"]) != bool(options.get("include_usage")), "the usage chunk is not the last")
    return usages


def _stream(answer: Answer, body: dict[str, Any], is_chat: bool) -> Told:
    demand((answer.header("content-type") or "").startswith("text/event-stream"), "no event stream")
    *events, done, rest = answer.body.decode().split("\n\n")
    demand((done, rest) == ("data: [DONE]", ""), f"the stream ends by {done[:200]!r} {rest[:200]!r}")
    try:
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        demand(all("error" not in chunk for chunk in chunks), f"an error in the stream: {chunks[-1]}")
        demand(
            len({(chunk["id"], chunk["seed"], chunk["model"]) for chunk in chunks}) == 1, "chunks of several answers"
        )
        usages = _usages(chunks, body.get("stream_options") or {})
        texts: dict[int, str] = {}
        reasons: dict[int, str] = {}
        for chunk in chunks:
            for choice in chunk["choices"]:
                index = choice["index"]
                demand(index not in reasons, f"choice {index} goes on after its end")
                text = choice["delta"].get("content") if is_chat else choice["text"]
                texts[index] = texts.get(index, "") + (text or "")
                if choice["finish_reason"] is not None:
                    reasons[index] = choice["finish_reason"]
        metrics = chunks[-1]["metrics"]["speculative_decoding"]
        details = collect(choice for chunk in chunks for choice in chunk["choices"])
        add_prompts(details.values(), chunks, is_chat)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise Wrong(f"no stream of chunks: {error!r}: {answer.body[:500]!r}") from error
    demand(
        sorted(texts) == sorted(reasons) == list(range(len(texts))), f"choices {sorted(texts)}, ended {sorted(reasons)}"
    )
    in_order = sorted(texts)
    seed, usage = chunks[0]["seed"], usages[-1] if usages else None
    told = [texts[i] for i in in_order], [reasons[i] for i in in_order]
    return Told(*told, seed, usage, metrics, [details[i] for i in in_order])
