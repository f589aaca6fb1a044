"""Where tools and thoughts are deleted: tools are refused by name, calls that a client sends back are passed over."""

import json
import subprocess
import sys

CODE = """
import json
from wingbeat.deployments import parts
parts.PARTS = tuple(part for part in parts.PARTS if part != "api.parsed")
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.unserved_fields import gather
from wingbeat.deployments.api.errors import ApiError
from wingbeat.deployments.app_config import AppConfig

said = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
body = {"messages": [said, {"role": "tool", "content": "sunny"}]}
try:
    ChatBody.of_fields({**body, "tools": [{"type": "function", "function": {"name": "f"}}]})
except ApiError as error:
    refused = error.status, error.param
ignored = gather(refuses=False)
chat = ChatBody.of_fields({**body, "tools": []})
print(json.dumps([refused, str(ignored), chat.template_messages(), "tool_call_parser" in AppConfig.model_fields]))
"""


def test_tools_are_refused_by_name_and_calls_of_before_are_passed_over():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    refused, ignored, messages, has_setting = json.loads(done.stdout)
    assert refused == [400, "tools"]
    assert ignored == "messages[0].tool_calls"
    assert messages == [{"role": "assistant", "content": ""}, {"role": "tool", "content": "sunny"}]
    assert not has_setting
