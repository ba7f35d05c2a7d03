#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a CUDA card, in one command and without network:
#   bench/gpu/run.sh [--minutes N] [--out DIR] [--no-tests]
#
# Builds the extension with meson into a folder of its own, stages the package beside it, runs the GPU tests (those
# in C where cmocka is found), the optimizer's step of a model of a billion parameters, and then the benchmarks: the
# registry, every peer that is installed, the frontier, the sweep, the most important first. Rows, logs and pictures
# go to DIR (default bench/results/gpu-<date>), and rows are flushed as they come, so a run that is cut off leaves
# what it has done. Without a card the tests are skipped, nothing is measured, and the exit status is 0.
#
# Needs: a C compiler, meson, ninja, and a `python3` (or $PYTHON) with its headers, torch and transformers;
# pytest and cmocka for the tests, matplotlib for the picture. Nothing is installed, the source tree stays as it is.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
minutes=25
out=
tests=yes
usage() { sed -n '4,14s/^# \{0,1\}//p' "$0"; }
while [ $# -gt 0 ]; do
  case $1 in
    --minutes) minutes=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --no-tests) tests=no; shift ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
out=${out:-$root/bench/results/gpu-$(date -u +%Y-%m-%d)}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
began=$SECONDS
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

say() { printf '%s %s\n' "$(date -u +%H:%M:%S)" "$*" | tee -ia "$out/run.log"; }
seconds_left() { echo $((minutes * 60 - (SECONDS - began))); }

# What is measured is staged outside of git, where it could not tell.
commit=$(git -C "$root" rev-parse --short=12 HEAD 2>/dev/null)
if [ -n "$commit" ]; then
  [ -z "$(git -C "$root" status --porcelain -uno 2>/dev/null)" ] || commit=$commit+
  export MEMSCALE_COMMIT=$commit
fi

# An interrupt is for what runs; this script ends after it.
trap 'exit 130' INT
if [ -n "${MEMSCALE_GPU_BUILD:-}" ]; then
  work=$MEMSCALE_GPU_BUILD
  mkdir -p "$work" || exit 1
else
  work=$(mktemp -d) || exit 1
  trap 'cp "$work/build.log" "$out" 2>/dev/null; rm -rf "$work"' EXIT
fi
versions='import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)'
say "building in $work with $($python -c "$versions" 2>&1 | tail -n 1)"
meson=meson
command -v meson >/dev/null || meson="$python -m mesonbuild.mesonmain"
# The extension is built for the interpreter that will import it.
printf '[binaries]\npython = %s\n' "'$(command -v "$python")'" >"$work/native.ini"
c_tests=false
[ "$tests" = yes ] && pkg-config --exists cmocka 2>/dev/null && c_tests=true
if [ -f "$work/build/build.ninja" ]; then
  $meson configure "$work/build" -Dtests=$c_tests >"$work/build.log" 2>&1
else
  $meson setup "$work/build" "$root" --native-file "$work/native.ini" -Dpython=true -Dcli=false -Dtests=$c_tests \
    --buildtype=release >"$work/build.log" 2>&1
fi ||
  { tail -n 30 "$work/build.log" | tee -a "$out/run.log"; say "meson setup failed"; exit 1; }
$meson compile -C "$work/build" >>"$work/build.log" 2>&1 ||
  { tail -n 30 "$work/build.log" | tee -a "$out/run.log"; say "the build failed"; exit 1; }

# The package, with the extension beside it, in a tree of its own: a _core that lies in the source is not used.
rm -rf "$work/stage"
mkdir -p "$work/stage"
cp -R "$root/python/memscale" "$work/stage/memscale"
rm -f "$work/stage/memscale/"_core*.so
cp "$work/build/python/"_core*.so "$work/stage/memscale/" || { say "the build left no extension"; exit 1; }
export PYTHONPATH=$work/stage
export MEMSCALE_LIBRARY=$work/build/src/libmemscale.so # for tests/python/gpu/test_gpu_optim_kernels.py
$python -c 'import memscale._core as core; print("core", core.version(), core.__file__)' | tee -a "$out/run.log"
[ "${PIPESTATUS[0]}" -eq 0 ] || { say "the extension does not load"; exit 1; }

status=0
# `timeout` gives what it runs a process group of its own, which no interrupt reaches, unless told otherwise.
within() { timeout --foreground --signal=INT --kill-after=20 "$@"; }
# At most half of the time: the benchmarks below are worth more than the last test.
limit=$(($(seconds_left) / 2))
ended() { # NAME STATUS: 124 is no failure, the time was up
  say "$1 ended with status $2"
  [ "$2" -eq 0 ] || [ "$2" -eq 124 ] || status=$2
}
if [ "$tests" = yes ] && [ "$limit" -le 30 ]; then
  say "no time for tests: $(seconds_left) s are left"
  tests=no
fi
if [ "$c_tests" = true ] && [ "$tests" = yes ]; then
  say "C tests, at most $limit s"
  nvrtc=$(PYTHONPATH=$root/tests/python/gpu $python -c 'import optim_steps; print(optim_steps.nvrtc() or "")')
  MEMSCALE_NVRTC=${MEMSCALE_NVRTC:-$nvrtc} within "$limit" $meson test -C "$work/build" --suite gpu --no-rebuild \
    --print-errorlogs 2>&1 | tee -i "$out/c_tests.log"
  ended "C tests" "${PIPESTATUS[0]}"
  limit=$(($(seconds_left) / 2))
elif [ "$tests" = yes ]; then
  say "cmocka is missing: no C tests"
fi
if [ "$tests" = yes ] && [ "$limit" -le 30 ]; then
  say "no time for tests in Python: $(seconds_left) s are left"
elif [ "$tests" = yes ] && $python -c 'import pytest' 2>/dev/null; then
  say "tests, at most $limit s"
  timeouts=$($python -c 'import pytest_timeout' 2>/dev/null && echo "-o timeout=300")
  MEMSCALE_GPU_RESULTS=$out within "$limit" \
    $python -m pytest -v -p no:cacheprovider -o addopts=-ra $timeouts \
    "$root/tests/python/gpu/test_gpu_optim_kernels.py" "$root/tests/python/gpu/test_gpu_equality.py" \
    "$root/tests/python/gpu" 2>&1 |
    tee -i "$out/tests.log" | { trap '' INT; grep -vE ' (PASSED|SKIPPED)'; }
  ended tests "${PIPESTATUS[0]}"
elif [ "$tests" = yes ]; then
  say "pytest is missing: no tests in Python"
fi

left=$(seconds_left)
if ! $python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  say "no CUDA card: nothing is measured"
elif [ "$left" -le 60 ]; then
  say "no time for benchmarks: $left s are left"
else
  limit=$((left / 4))
  say "an optimizer's step on a card, streamed through it, and on the host, at most $limit s"
  within "$limit" $python "$root/bench/python/optimizer_card.py" --out "$out" 2>&1 | tee -i "$out/optimizer_card.log"
  ended "the optimizer's step" "${PIPESTATUS[0]}"
  left=$(seconds_left)
  say "benchmarks, at most $left s"
  # They stop by themselves when the time is up; `timeout` is for what hangs.
  within "$left" $python -m memscale.benchmarks --device cuda --out "$out" \
    --minutes "$(awk "BEGIN { print ($left - 30) / 60 }")" --peers --frontier --sweep 2>&1 |
    tee -i "$out/benchmarks.log"
  ended benchmarks "${PIPESTATUS[0]}"
fi
say "done in $((SECONDS - began)) s, results in $out"
exit "$status"
