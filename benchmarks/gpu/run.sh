#!/usr/bin/env bash
# run.sh [first|speed|peers]: GPU tests and measurements of this folder, into one report, each session within ten minutes.
# Needs torch, triton, transformers and pytest (pytest-timeout and pytest-xdist where they are installed).
# Options go to _suite.py (--help lists them). PYTHON names the interpreter, OUT the folder of the report.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# The top-level folders are packages of `wingbeat` once it is installed; here links do the same.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
mkdir "$packages/wingbeat"
for folder in kernels runtime cluster deployments; do
    ln -s "$root/$folder" "$packages/wingbeat/$folder"
done
export PYTHONPATH="$packages${PYTHONPATH:+:$PYTHONPATH}"
"${PYTHON:-python3}" "$root/benchmarks/gpu/_suite.py" "$@"
