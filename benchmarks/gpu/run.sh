#!/usr/bin/env bash
# run.sh [first|speed|peers|served|next|next2|kinds]: GPU tests and measurements of this folder, into one report, each session within ten minutes.
# Needs torch, triton, transformers and pytest (pytest-timeout and pytest-xdist where they are installed); `served` an
# installed Wingbeat.
# Options go to _suite.py (--help lists them). PYTHON names the interpreter, OUT the folder of the report.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# `wingbeat` need not be installed.
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$root/benchmarks/gpu/_suite.py" "$@"
