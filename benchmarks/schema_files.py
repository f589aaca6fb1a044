"""JSON schemas of real programs: how many are served, and whether their grammars accept the right instances.

    .venv/bin/python benchmarks/schema_files.py --data FOLDER [--tokenizer FOLDER] [--count 1800] [--seed 0]

FOLDER is `maskbench/data` of guidance-ai/jsonschemabench: each file has a schema, and instances marked as valid or
invalid. The report also states how many schemas llguidance accepts by itself. A valid instance may be rejected because
its keys are in another order than the schema's, or because a bound ends its masks.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher

from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.grammar.compiler import Grammars
from wingbeat.runtime.grammar.grammar_masker import RequestGrammar, fill_row
from wingbeat.runtime.scheduling.request import GrammarSpec
from wingbeat.runtime.tokenizer import Tokenizer


class Instance(NamedTuple):
    """Validity of one instance, and whether the grammar accepts it."""

    is_valid: bool
    is_taken: bool


def main() -> None:
    """Measures, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmark's files")
    parser.add_argument("--tokenizer", type=Path, help="folder of a checkpoint; default: the demo's")
    parser.add_argument("--count", type=int, default=1800, help="number of files to draw")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer or demo_pair().verifier)
    model = tokenizer.hugging_face
    grammars = Grammars(tokenizer, len(model), frozenset([model.eos_token_id]))
    files = sorted(args.data.glob("*.json"))
    files = random.Random(args.seed).sample(files, min(args.count, len(files)))
    alone, refused, instances = 0, Counter(), {}
    compile_s: list[float] = []
    mask_s: list[float] = []
    for file in files:
        case = json.loads(file.read_text())
        alone += served_alone(case["schema"], grammars)
        began = time.thread_time()
        try:
            grammar = grammars.compile(GrammarSpec("json", json.dumps(case["schema"]), "schema"))
        except ValueError as error:
            refused[str(error)[:70]] += 1
            continue
        compile_s.append(time.thread_time() - began)
        instances[file.name] = [
            Instance(test["valid"], taken(grammar, test["data"], mask_s)) for test in case.get("tests", ())
        ]
    report(len(files), alone, instances, refused)
    print(f"compile, ms: median {1e3 * statistics.median(compile_s):.1f}, {quantiles(compile_s)}")
    print(f"{len(mask_s):,} masks, ms: mean {1e3 * statistics.mean(mask_s):.3f}, {quantiles(mask_s)}")


def served_alone(schema: Any, grammars: Grammars) -> bool:
    """Whether llguidance compiles the unmodified schema."""
    try:
        made = LLMatcher(grammars.vocabulary().tokens, LLMatcher.grammar_from_json_schema(schema), log_level=0)
    except ValueError:
        return False
    return not made.is_error()


def taken(grammar: RequestGrammar, value: Any, mask_s: list[float]) -> bool:
    """Whether the mask allows each token of an instance in turn, and the end after the last one."""
    matcher, mask = grammar.matcher(), np.zeros((1, grammar.vocabulary.num_words), np.int32)
    for token_id in grammar.vocabulary.encode(json.dumps(value, ensure_ascii=False)):
        began = time.thread_time()
        fill_row(matcher, mask, 0)
        mask_s.append(time.thread_time() - began)
        if matcher.is_error() or not mask[0, token_id >> 5] >> (token_id & 31) & 1:
            return False
        matcher.consume_token(token_id)
    return matcher.is_accepting()


def report(num_files: int, alone: int, instances: dict[str, list[Instance]], refused: Counter[str]) -> None:
    """Prints numbers of served schemas, and of wrongly rejected and accepted instances."""
    found = [one for some in instances.values() for one in some]
    valid, invalid = ([one for one in found if one.is_valid is kind] for kind in (True, False))
    whole = sum(all(one.is_taken for one in some if one.is_valid) for some in instances.values())
    print(f"{num_files} files: {len(instances)} served ({len(instances) / num_files:.1%}), ", end="")
    print(f"by llguidance alone {alone} ({alone / num_files:.1%})")
    print(f"served schemas whose valid instances can all be written: {whole} ({whole / len(instances):.2%})")
    print(f"valid instances missed: {sum(not one.is_taken for one in valid)} of {len(valid)}")
    print(f"invalid instances taken: {sum(one.is_taken for one in invalid)} of {len(invalid)}")
    for name, some in instances.items():
        if any(one.is_taken is not one.is_valid for one in some):
            print(f"  {name}")
    for reason, count in refused.most_common(12):
        print(f"{count:5} refused: {reason}")


def quantiles(seconds: list[float]) -> str:
    """Formats two quantiles and the maximum, in milliseconds."""
    ordered = sorted(seconds)
    p99, p999 = (1e3 * ordered[int(share * (len(ordered) - 1))] for share in (0.99, 0.999))
    return f"99 % {p99:.2f}, 99.9 % {p999:.2f}, largest {1e3 * ordered[-1]:.1f}"


if __name__ == "__main__":
    main()
