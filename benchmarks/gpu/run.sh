#!/usr/bin/env bash
# The GPU tests and every measurement of this folder, into one report: needs torch, triton, transformers and pytest.
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
