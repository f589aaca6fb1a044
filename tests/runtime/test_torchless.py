"""Processes of text alone: a router and the command tokenize as others do, and have no torch."""

import json
import subprocess
import sys

from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.tokenizer import Tokenizer

TEXT = "def f(x):\n    return 'ÄÖ → 🙂'\n"
ROUTER = """
import json, sys
import wingbeat.deployments.cli.main, wingbeat.deployments.launch
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.torchless import keep_torch_out
keep_torch_out()
tokenizer = Tokenizer.load(sys.argv[1])
messages = [{"role": "user", "content": sys.argv[2]}]
token_ids = tokenizer.encode(sys.argv[2])
found = [token_ids, tokenizer.decode(token_ids), tokenizer.encode_chat(messages), "torch" in sys.modules]
print(json.dumps(found))
"""


def test_a_routers_imports_and_its_tokenizer_need_no_torch():
    folder = demo_pair().verifier
    command = [sys.executable, "-c", ROUTER, str(folder), TEXT]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    token_ids, text, chat, has_torch = json.loads(printed.stdout.splitlines()[-1])
    tokenizer = Tokenizer.load(folder)
    assert token_ids == tokenizer.encode(TEXT)
    assert text == tokenizer.decode(token_ids) == TEXT
    assert chat == tokenizer.encode_chat([{"role": "user", "content": TEXT}])
    assert not has_torch
    assert printed.stderr == ""
