#!/usr/bin/env bash
# An outside judge: ckpt-chaos kills the training example at every file event it makes, in four ways,
# resumes it, and compares the result with an undisturbed run. Anything but PASS is a failure.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${1:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$(dirname "$python")/ckpt-chaos" run \
    --modes before,torn,term,unsynced --max-points "${POINTS:-120}" --timeout 120 --grace 10 \
    --step-regex 'resumed from step (\d+)' --checkpoint-glob '{out}/ckpt/step-*[0-9]' \
    --result-file '{out}/final.json' \
    --fail-on HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK,CONTROL_FAIL \
    --work "$work/runs" -- "$python" chaos/repeatable.py --out '{out}' --steps 9 --every 3
