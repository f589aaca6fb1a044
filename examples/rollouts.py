"""Reinforcement learning with a running server: sample, reward, train, and send the new weights to the server.

    wingbeat serve --rollouts --weight-transfer-config '{"backend": "gloo"}'
    python examples/rollouts.py --verify

The policy is the demo's verifier, trained on this machine's CPU by REINFORCE with a mean baseline. The reward of an
answer is the share of its tokens that equal `--token`. The server samples with its drafter, and sleeps while the policy
trains. `--verify` decodes every answer again, plainly, with a model that has the weights of that step.
"""

import argparse
import hashlib
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from wingbeat import LLM, SamplingParams
from wingbeat.deployments.cli.server_calls import LOCAL, call_server
from wingbeat.deployments.rollouts.trainer import WeightSender
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.tokenizer import Tokenizer

PROMPTS = (
    "def main():\n    ",
    "class Queue:\n    def put(self, item):\n        ",
    "import os\n\n\ndef read(path):\n    ",
    "for name in names:\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "def parse(line):\n    ",
    "try:\n    import json\n",
    "with open(path) as file:\n    ",
    "class Reader(Base):\n    def read(self, size=-1):\n        ",
    "if __name__ == ",
    "def __repr__(self):\n        return ",
    "    def close(self):\n        ",
    "class Error(Exception):\n    ",
    "while True:\n    ",
    "def test_empty(self):\n        ",
    "    def __len__(self):\n        ",
)


def main() -> None:
    """Runs the training loop."""
    args = arguments()
    policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = Tokenizer.load(args.model)
    (wanted,) = tokenizer.encode(args.token)
    optimizer = torch.optim.SGD(policy.parameters(), lr=args.learning_rate)
    sender = WeightSender(args.url, args.operator_key)
    for step in range(args.steps):
        began = time.perf_counter()
        answers = sample(args, tokenizer, step)
        sampled_s = time.perf_counter() - began
        if args.verify:
            verify(policy, answers, Path(args.model), args.max_tokens)
        began = time.perf_counter()
        sender.call("sleep", level=1)
        asleep_s = time.perf_counter() - began
        rewards = train(policy, optimizer, answers, wanted)
        began = time.perf_counter()
        sender.call("wake_up")
        sender.send(policy.named_parameters(), version=str(step + 1))
        updated_s = time.perf_counter() - began
        texts = hashlib.sha256(repr([answer["token_ids"] for answer in answers]).encode()).hexdigest()[:12]
        print(
            f"step {step}: reward {rewards.mean():.3f}, texts {texts}, {len(answers)} answers in {sampled_s:.2f} s, "
            f"{tokens_a_round(answers):.2f} tokens a drafted round, sleep {asleep_s * 1e3:.0f} ms, "
            f"wake-up and update {updated_s * 1e3:.0f} ms",
            flush=True,
        )


def sample(args: argparse.Namespace, tokenizer: Tokenizer, step: int) -> list[dict[str, Any]]:
    """Samples answers to each prompt at temperature 1, each with its own seed."""

    def one(index: int) -> dict[str, Any]:
        prompt = tokenizer.encode(PROMPTS[index % len(PROMPTS)])
        seed = step * 10_000 + index
        body = {"prompt": prompt, "max_tokens": args.max_tokens, "seed": seed, "return_token_ids": True}
        answer = call_server(args.url, args.operator_key, "POST", "/v1/completions", body)
        drafted = answer["metrics"]["speculative_decoding"]
        return {"prompt": prompt, "seed": seed, "token_ids": answer["choices"][0]["token_ids"], "drafted": drafted}

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(one, range(len(PROMPTS) * args.samples)))


def tokens_a_round(answers: list[dict[str, Any]]) -> float:
    """Tokens per round with a draft, which shows how well the draft head fits the present policy."""
    counts = {
        name: sum(answer["drafted"][name] for answer in answers) for name in ("num_drafts", "num_accepted_tokens")
    }
    return 1 + counts["num_accepted_tokens"] / max(1, counts["num_drafts"])


def train(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, answers: list[dict[str, Any]], wanted: int
) -> Tensor:
    """Takes a step of REINFORCE; returns the reward of each answer."""
    rewards = torch.tensor([answer["token_ids"].count(wanted) / len(answer["token_ids"]) for answer in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    optimizer.zero_grad()
    for answer, advantage in zip(answers, advantages, strict=True):
        ids = torch.tensor([answer["prompt"] + answer["token_ids"]])
        logits = policy(ids).logits[0, len(answer["prompt"]) - 1 : -1]
        chosen = logits.log_softmax(-1).gather(1, ids[0, len(answer["prompt"]) :, None])
        (-advantage * chosen.mean() / len(answers)).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return rewards


def verify(policy: PreTrainedModel, answers: list[dict[str, Any]], model: Path, max_tokens: int) -> None:
    """Decodes the answers again, without server and drafts, by a model with these weights.

    Raises:
        AssertionError: an answer differs.
    """
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            if (model / name).exists():
                (Path(folder) / name).write_bytes((model / name).read_bytes())
        params = [SamplingParams(max_tokens=max_tokens, seed=answer["seed"]) for answer in answers]
        llm = LLM(folder, "none", dtype="float32")
        again = llm.generate([answer["prompt"] for answer in answers], params, progress=False)
    for answer, result in zip(answers, again, strict=True):
        assert list(result.token_ids) == answer["token_ids"], f"the answer of seed {answer['seed']} is another one"


def arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Train the demo's verifier on what a running server samples from it.")
    parser.add_argument("--url", default=LOCAL, help="of the server")
    parser.add_argument("--operator-key", help="of the server")
    parser.add_argument("--model", default=str(demo_pair().verifier), help="folder of the policy that is served")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--token", default="self", help="a text of one token, which is rewarded")
    parser.add_argument("--verify", action="store_true", help="decode every answer again, plainly")
    return parser.parse_args()


if __name__ == "__main__":
    main()
