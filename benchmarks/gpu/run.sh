#!/usr/bin/env bash
# run.sh [first|speed|peers|served|next|next2|kinds]: runs GPU tests and measurements of this folder and writes one
# report; each session takes at most ten minutes.
# Needs torch, triton, transformers and pytest; uses pytest-timeout and pytest-xdist if installed. `served` needs an
# installed Wingbeat.
# Options are passed to _suite.py (--help lists them). PYTHON names the interpreter, OUT the folder of the report.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# Makes `wingbeat` importable without installation.
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$root/benchmarks/gpu/_suite.py" "$@"
