#!/usr/bin/env bash
# One command for AMD Strix Halo: sets libtorch up, builds, gets the data, as far as that has not been done, and trains.
# Usage: ./run.sh [FLAG OF 'train']...     NUM_SHARDS=N: how many files of training text to fetch, 10 unless set
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# Prints a command and runs it.
run() {
  printf '+' >&2
  printf ' %q' "$@" >&2
  printf '\n' >&2
  "$@"
}

[[ " $* " != *" --help "* && " $* " != *" -h "* ]] || {
  sed -n '2,3p' "$0" | cut -c3-
  exit
}
autoresearch=(cargo run --release --features tch --)
train=(train)
[[ " $* " == *" --config"* ]] || train+=(--config configs/halo.toml)
# Not 'auto': on this machine, training on the CPU because the GPU is not usable would be a mistake.
[[ " $* " == *" --device"* ]] || train+=(--device libtorch)

# It only looks whether all is there, if it has been run before; another's settings are left alone.
mark='# Written by scripts/setup-libtorch.'
if [ -z "${LIBTORCH:-}" ] && { [ ! -e .cargo/config.toml ] || [ "$(head -n 1 .cargo/config.toml)" = "$mark" ]; }; then
  run scripts/setup-libtorch
fi
# With data of one's own choice, 'train' says what to do if it is not prepared.
if [[ " $* " != *" --dataset"* && " $* " != *" --cache-dir"* ]] &&
  [ ! -e "${AUTORESEARCH_CACHE_DIR:-$HOME/.cache/autoresearch}/climbmix/prepared.json" ]; then
  run "${autoresearch[@]}" prepare --config configs/halo.toml --num-shards "${NUM_SHARDS:-10}"
fi
run "${autoresearch[@]}" "${train[@]}" "$@"
