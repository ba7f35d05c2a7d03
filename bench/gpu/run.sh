#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a CUDA card, in one command and without network:
#   bench/gpu/run.sh [--minutes N] [--out DIR] [--no-tests]
#
# Builds the extension with meson into a folder of its own, stages the package beside it, runs the GPU tests and
# then bench/gpu/peaks.py. Rows and logs go to DIR (default $OUT, else bench/results/gpu-<date>) and are flushed
# as they come, so a run that is cut off leaves what it has done. Without a card the tests are skipped and the
# exit status is 0.
#
# Needs: a C compiler, meson, ninja, and a `python3` (or $PYTHON) with its headers, torch and transformers;
# pytest for the tests. Nothing is installed and the source tree stays as it is.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
minutes=25
out=${OUT:-}
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
$python -c 'import memscale._core as core; print("core", core.version(), core.__file__)' | tee -a "$out/run.log"
[ "${PIPESTATUS[0]}" -eq 0 ] || { say "the extension does not load"; exit 1; }

status=0
if [ "$tests" = yes ] && $python -c 'import pytest' 2>/dev/null; then
  # At most 60 % of the time: the benchmark below is worth more than the last test.
  limit=$(($(seconds_left) * 6 / 10))
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
if [ "$left" -gt 30 ]; then
  say "peaks, at most $left s"
  timeout --kill-after=20 "$left" $python "$root/bench/gpu/peaks.py" --out "$out" --minutes "$((left / 60 + 1))" \
    2>&1 | tee "$out/peaks.log"
  peaks=${PIPESTATUS[0]}
  [ "$peaks" -eq 0 ] || [ "$peaks" -eq 124 ] || status=$peaks
fi
say "done in $((SECONDS - began)) s, results in $out"
exit "$status"
