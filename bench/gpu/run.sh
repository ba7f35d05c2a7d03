#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a CUDA card, in one command and without network:
#   bench/gpu/run.sh [--minutes N] [--out DIR] [--no-tests]
#
# Builds the extension with meson into a folder of its own, stages the package beside it, runs the GPU tests and
# then the benchmarks: the registry, every peer that is installed, the frontier, the sweep, the most important
# first. Rows, logs and pictures go to DIR (default $OUT, else bench/results/gpu-<date>), and rows are flushed
# as they come, so a run that is cut off leaves what it has done. Without a card the tests are skipped, nothing
# is measured, and the exit status is 0.
#
# Needs: a C compiler, meson, ninja, and a `python3` (or $PYTHON) with its headers, torch and transformers;
# pytest for the tests, matplotlib for the picture. Nothing is installed and the source tree stays as it is.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
minutes=25
out=${OUT:-}
tests=yes
usage() { sed -n '4,15s/^# \{0,1\}//p' "$0"; }
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

say() { printf '%s %s\n' "$(date -u +%H:%M:%S)" "$*" | tee -a "$out/run.log"; }
seconds_left() { echo $((minutes * 60 - (SECONDS - began))); }

work=${MEMSCALE_GPU_BUILD:-$(mktemp -d)}
versions='import platform, torch; print("Python", platform.python_version(), "torch", torch.__version__)'
say "building in $work with $($python -c "$versions" 2>&1 | tail -n 1)"
meson=meson
command -v meson >/dev/null || meson="$python -m mesonbuild.mesonmain"
# The extension is built for the interpreter that will import it.
printf '[binaries]\npython = %s\n' "'$(command -v "$python")'" >"$work/native.ini"
[ -f "$work/build/build.ninja" ] || $meson setup "$work/build" "$root" --native-file "$work/native.ini" \
  -Dpython=true -Dcli=false -Dtests=false --buildtype=release >"$work/build.log" 2>&1 ||
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
if [ "$tests" = yes ] && $python -c 'import pytest' 2>/dev/null; then
  # At most half of the time: the benchmarks below are worth more than the last test.
  limit=$(($(seconds_left) / 2))
  say "tests, at most $limit s"
  timeouts=$($python -c 'import pytest_timeout' 2>/dev/null && echo "-o timeout=300")
  MEMSCALE_GPU_RESULTS=$out timeout --kill-after=20 "$limit" \
    $python -m pytest -v -p no:cacheprovider -o addopts=-ra $timeouts \
    "$root/tests/python/gpu/test_gpu_equality.py" "$root/tests/python/gpu" 2>&1 |
    tee "$out/tests.log" | grep -vE ' (PASSED|SKIPPED)'
  status=${PIPESTATUS[0]}
  say "tests ended with status $status"
elif [ "$tests" = yes ]; then
  say "pytest is missing: no tests"
fi

left=$(seconds_left)
if ! $python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  say "no CUDA card: nothing is measured"
elif [ "$left" -gt 60 ]; then
  say "benchmarks, at most $left s"
  # They stop by themselves when the time is up; `timeout` is for what hangs.
  timeout --signal=INT --kill-after=20 "$left" $python -m memscale.benchmarks --device cuda --out "$out" \
    --minutes "$(awk "BEGIN { print ($left - 30) / 60 }")" --peers --frontier --sweep 2>&1 | tee "$out/benchmarks.log"
  measured=${PIPESTATUS[0]}
  [ "$measured" -eq 0 ] || [ "$measured" -eq 124 ] || status=$measured
fi
say "done in $((SECONDS - began)) s, results in $out"
exit "$status"
