"""Fields of requests that other servers take, read from their own sources into `foreign_fields.json`.

    python tests/deployments/api/foreign_fields.py VLLM_WHEEL SGLANG_WHEEL LLAMA_CPP_PYTHON_SDIST

The three are as PyPI has them (`pip download --no-deps`); llama.cpp's server lies in the source package of its binding.
Python classes are read as syntax, C++ by the calls that name a field: nothing is run.
"""

import ast
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

DATA = Path(__file__).with_suffix(".json")
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat", "completions", "responses", "messages"
PROTOCOLS = {
    "vllm": {
        CHAT: ("vllm/entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest"),
        COMPLETIONS: ("vllm/entrypoints/openai/completion/protocol.py", "CompletionRequest"),
        RESPONSES: ("vllm/entrypoints/openai/responses/protocol.py", "ResponsesRequest"),
        MESSAGES: ("vllm/entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"),
    },
    "sglang": {
        CHAT: ("sglang/srt/entrypoints/openai/protocol.py", "ChatCompletionRequest"),
        COMPLETIONS: ("sglang/srt/entrypoints/openai/protocol.py", "CompletionRequest"),
        RESPONSES: ("sglang/srt/entrypoints/openai/protocol.py", "ResponsesRequest"),
        MESSAGES: ("sglang/srt/entrypoints/anthropic/protocol.py", "AnthropicMessagesRequest"),
    },
}
"""By server and endpoint, the file and the class of a request."""
SERVER = "vendor/llama.cpp/tools/server"
_SCHEMA = re.compile(r'(?:field_\w+\("|add_alias\(")([\w.]+)"')
_BODY = re.compile(r'(?:json_value\(body, "|body\.(?:contains|at)\(")(\w+)"')
_SWITCHED_OFF = re.compile(r"^#if 0$.*?^#endif$|//[^\n]*", re.DOTALL | re.MULTILINE)


def of_class(source: str, name: str) -> set[str]:
    """Fields of a pydantic class and of its bases in the same file, and their aliases."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    fields: set[str] = set()
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            fields |= of_class(source, base.id)
    for node in classes[name].body:
        is_field = isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
        if is_field and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            fields.add(node.target.id)
    return fields - {"model_config", "field_names"}


def of_wheel(path: Path, server: str) -> dict[str, list[str]]:
    """Fields by endpoint: those of completions, and the additional ones of chats."""
    with zipfile.ZipFile(path) as wheel:
        return {
            endpoint: sorted(of_class(wheel.read(file).decode(), name))
            for endpoint, (file, name) in PROTOCOLS[server].items()
        }


def of_llama_cpp(path: Path) -> dict[str, list[str]]:
    """Fields by endpoint: those of completions, and the additional ones of chats."""
    with tarfile.open(path) as package:
        files = {name.partition("/")[2]: name for name in package.getnames() if SERVER in name}

        def text(name: str) -> str:
            return _SWITCHED_OFF.sub("", package.extractfile(files[f"{SERVER}/{name}"]).read().decode())

        schema, common = set(_SCHEMA.findall(text("server-schema.cpp"))), text("server-common.cpp")
    # Fields that the chat parser passes to the schema are not sent by clients.
    handed_on = {"chat_format", "chat_parser", "parse_tool_calls", "preserved_tokens", "grammar_triggers"}
    handed_on |= {"grammar_lazy", "grammar_type", "generation_prompt", "include_usage"}
    schema -= handed_on
    begin = common.index("json oaicompat_chat_params_parse(")
    chat = set(_BODY.findall(common[begin : common.index("\n}\n", begin)]))
    return {CHAT: sorted(schema | chat), COMPLETIONS: sorted(schema | {"prompt"})}


def main() -> None:
    """Write the file."""
    vllm, sglang, llama_cpp = map(Path, sys.argv[1:])
    found = {
        f"vllm {vllm.name.split('-')[1]}": of_wheel(vllm, "vllm"),
        f"sglang {sglang.name.split('-')[1]}": of_wheel(sglang, "sglang"),
        f"llama.cpp of llama-cpp-python {llama_cpp.name.removesuffix('.tar.gz').rpartition('-')[2]}": of_llama_cpp(
            llama_cpp
        ),
    }
    DATA.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
