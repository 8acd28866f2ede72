#!/usr/bin/env bash
# Collects into a folder what scripts/gpu_check.py needs, for a machine that has Python 3.12, torch, peft and pyarrow, and no network:
#   scripts/gpu_wheels.sh FOLDER
# There, in a copy of this source with FOLDER beside it:
#   python -m pip install --no-index --no-deps --find-links FOLDER --target site FOLDER/*.whl
#   PYTHONPATH=src:site python scripts/gpu_check.py
set -euo pipefail
folder=${1:?folder for the wheels}
packages=(transformers zstandard blake3 msgspec pyzmq pydantic pydantic-core annotated-types typing-inspection psutil tomli-w pytest pytest-timeout iniconfig pluggy hypothesis sortedcontainers)
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_26_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
# The versions that this project is tested with (pyproject.toml).
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
sed -n '/^constraint-dependencies/,/^]/s/^ *"\([^"]*\)",$/\1/p' "$(dirname "$0")/../pyproject.toml" > "$constraints"
mkdir -p "$folder"
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
  "${platforms[@]}" --constraint "$constraints" --dest "$folder" "${packages[@]}"
du -sh "$folder"
