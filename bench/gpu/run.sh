#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that needs a CUDA card, in one command and without network:
#   bench/gpu/run.sh [--minutes N] [--out DIR] [--stages LIST] [--jobs N] [-- PYTEST ARGUMENTS]
#
# Builds the extension with meson into a folder of its own, stages the package beside it, and does the stages of LIST
# (default "card c tests optimizer benchmarks") in this order, the most important first:
#   card        the card's memory outside the allocator, its rates and its link
#   scratch     what cuDNN's operators allocate; not in the default
#   c           the C tests of the GPU suite, where cmocka is found
#   tests       the GPU tests in Python, N processes at once where pytest-xdist is found
#   optimizer   the optimizer's step of a model of a billion parameters
#   benchmarks  the registry, every peer that is installed, the frontier, the sweep; with N > 1 the models at once,
#               each training alone
# Rows, logs and pictures go to DIR (default bench/results/gpu-<date>), and rows are flushed as they come, so a run
# that is cut off leaves what it has done. Without a card the tests are skipped, nothing is measured, and the exit
# status is 0.
#
# Needs: a C compiler, meson, ninja, and a `python3` (or $PYTHON) with its headers, torch and transformers;
# pytest and cmocka for the tests, matplotlib for the picture. Nothing is installed, the source tree stays as it is.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
minutes=25
out=
stages="card c tests optimizer benchmarks"
jobs=$(($(nproc) / 2))
usage() { sed -n '4,23s/^# \{0,1\}//p' "$0"; }
while [ $# -gt 0 ]; do
  case $1 in
    --minutes) minutes=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --stages) stages=$2; shift 2 ;;
    --jobs) jobs=$2; shift 2 ;;
    --) shift; break ;;
    -h | --help) usage; exit 0 ;;
    *) usage >&2; exit 2 ;;
  esac
done
case $minutes$jobs in *[!0-9]*) echo "--minutes and --jobs: whole numbers" >&2; exit 2 ;; esac
for stage in $stages; do
  case $stage in
    card | scratch | c | tests | optimizer | benchmarks) ;;
    *) echo "--stages: $stage; allowed: card scratch c tests optimizer benchmarks" >&2; exit 2 ;;
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
if [ -z "${MEMSCALE_COMMIT:-}" ] && [ -n "$commit" ]; then
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
case " $stages " in *" c "*) pkg-config --exists cmocka 2>/dev/null && c_tests=true ;; esac
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
export PYTHONPATH=$work/stage${PYTHONPATH:+:$PYTHONPATH}
export MEMSCALE_LIBRARY=$work/build/src/libmemscale.so # for tests/python/gpu/test_gpu_optim_kernels.py
$python -c 'import memscale._core as core; print("core", core.version(), core.__file__)' | tee -a "$out/run.log"
[ "${PIPESTATUS[0]}" -eq 0 ] || { say "the extension does not load"; exit 1; }

status=0
asked() { case " $stages " in *" $1 "*) ;; *) return 1 ;; esac; }
# `timeout` gives what it runs a process group of its own, which no interrupt reaches, unless told otherwise.
within() { timeout --foreground --signal=INT --kill-after=20 "$@"; }
# Sets `limit` to a share of the time that is left; fails where that is not worth a start.
share() { # NAME PARTS
  limit=$(($(seconds_left) / $2))
  [ "$limit" -gt 30 ] || { say "no time for $1: $(seconds_left) s are left"; return 1; }
}
ended() { # NAME STATUS: 124 is no failure, the time was up
  say "$1 ended with status $2"
  [ "$2" -eq 0 ] || [ "$2" -eq 124 ] || status=$2
}
python_tests() { # PYTEST ARGUMENTS
  MEMSCALE_GPU_RESULTS=$out within "$limit" $python -m pytest -v -p no:cacheprovider -o addopts=-ra $timeouts "$@" \
    2>&1 | tee -ia "$out/tests.log" | { trap '' INT; grep -E '^(FAILED|ERROR|E  )|^=+ |^! '; }
  local code=${PIPESTATUS[0]}
  [ "$code" -eq 5 ] || ended tests "$code" # 5: none of the tests that were asked for is of this kind
}
card=no
$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' && card=yes

if asked card && [ $card = yes ] && share "the card" 4; then
  say "the card, at most $limit s"
  nvidia-smi >"$out/card.txt" 2>&1
  within "$limit" $python "$root/bench/gpu/card.py" --out "$out" 2>&1 | tee -i "$out/card.log"
  ended "the card" "${PIPESTATUS[0]}"
fi
if asked scratch && [ $card = yes ] && share "scratch" 4; then
  say "what cuDNN's operators allocate, at most $limit s"
  within "$limit" $python "$root/bench/gpu/scratch.py" --out "$out" --seconds $((limit / 2)) >"$out/scratch.log" 2>&1
  ended "cuDNN's operators" $?
fi
# Tests get at most half of the time each, where benchmarks follow: those are worth more than the last test.
part=1
{ asked optimizer || asked benchmarks; } && part=2
if asked c && [ "$c_tests" != true ]; then
  say "cmocka is missing: no C tests"
elif asked c && share "C tests" $part; then
  say "C tests, at most $limit s"
  nvrtc=$(PYTHONPATH=$root/tests/python/gpu $python -c 'import optim_steps; print(optim_steps.nvrtc() or "")')
  MEMSCALE_NVRTC=${MEMSCALE_NVRTC:-$nvrtc} within "$limit" $meson test -C "$work/build" --suite gpu --no-rebuild \
    --print-errorlogs 2>&1 | tee -i "$out/c_tests.log"
  ended "C tests" "${PIPESTATUS[0]}"
fi
if asked tests && ! $python -c 'import pytest' 2>/dev/null; then
  say "pytest is missing: no tests in Python"
elif asked tests && share "tests in Python" $part; then
  timeouts=$($python -c 'import pytest_timeout' 2>/dev/null && echo "-o timeout=300")
  [ $# -gt 0 ] || set -- "$root/tests/python/gpu/test_gpu_optim_kernels.py" \
    "$root/tests/python/gpu/test_gpu_equality.py" "$root/tests/python/gpu"
  say "tests that need the card alone, at most $limit s"
  python_tests -m alone "$@"
  # Processes beside each other share the card, not its allocator: what a test measures is its own.
  parallel=
  [ "$jobs" -gt 1 ] && $python -c 'import xdist' 2>/dev/null && parallel="-n $jobs --dist worksteal"
  share "other tests" $part && say "the other tests, at most $limit s" && python_tests -m "not alone" $parallel "$@"
fi

if [ $card = no ]; then
  say "no CUDA card: nothing is measured"
  exit "$status"
fi
if asked optimizer && share "the optimizer's step" 4; then
  say "an optimizer's step on a card, streamed through it, and on the host, at most $limit s"
  within "$limit" $python "$root/bench/python/optimizer_card.py" --out "$out" 2>&1 | tee -i "$out/optimizer_card.log"
  ended "the optimizer's step" "${PIPESTATUS[0]}"
fi
benchmarks() { # DIR OPTIONS: they stop by themselves when the time is up; `timeout` is for what hangs
  local to=$1
  shift
  within "$limit" $python -m memscale.benchmarks --device cuda --out "$to" \
    --minutes "$(awk "BEGIN { print ($limit - 30) / 60 }")" "$@"
}
if asked benchmarks && share benchmarks 1; then
  say "benchmarks, at most $limit s"
  if [ "$jobs" -gt 1 ]; then
    export MEMSCALE_BENCH_LOCK=$work/lock # one trains at a time
    names=$($python -c 'from memscale.benchmarks.registry import BENCHMARK_MODELS as m; print(*(x.name for x in m))')
    for name in $names; do
      benchmarks "$out/$name" --models "$name" --peers --frontier >"$out/$name.log" 2>&1 &
    done
    benchmarks "$out/sweep" --ways "" --sweep >"$out/sweep.log" 2>&1 &
    wait
    for name in $names sweep; do # one table, under one header
      sed "$([ -f "$out/benchmarks.csv" ] && echo 1d)" "$out/$name/benchmarks.csv" >>"$out/benchmarks.csv"
      tail -n 40 "$out/$name.log"
    done
  else
    benchmarks "$out" --peers --frontier --sweep 2>&1 | tee -i "$out/benchmarks.log"
    ended benchmarks "${PIPESTATUS[0]}"
  fi
fi
say "done in $((SECONDS - began)) s, results in $out"
exit "$status"
