#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds a release and runs all benchmarks: bench/run.sh [--quick | --all] [--dry]
#
# The C benchmarks' rows are appended to bench/results/c.csv, the Python scripts append to a file each, row by row:
# a run that is cut off leaves what it has done. --quick leaves out what takes longest, --dry appends nothing.
# Published measurements (bench/published) are predicted in part and only printed; --all predicts every row and
# appends it. The build goes to $MEMSCALE_BENCH_BUILD, else to a temporary folder, which is removed at the end.
# Python: $PYTHON (python3), with torch and transformers.
# Not here, because it needs a CUDA build of PyTorch: bench/standin, see CONTRIBUTING.md.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
quick= all= dry=
for word in "$@"; do
  case $word in
    --quick) quick=--quick ;;
    --all) all=--all ;;
    --dry) dry=--dry ;;
    *) sed -n '4,11s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
work=${MEMSCALE_BENCH_BUILD:-}
if [ -z "$work" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
fi
trap 'exit 130' INT TERM

[ -f "$work/build.ninja" ] || meson setup "$work" "$root" --buildtype=release -Dbench=true -Dpython=true \
  -Dcli=false -Dtests=false >/dev/null
meson compile -C "$work" >/dev/null
mkdir -p "$work/stage"
rm -rf "$work/stage/memscale"
cp -R "$root/python/memscale" "$work/stage/"
rm -f "$work/stage/memscale/"_core*.so
cp "$work/python/"_core*.so "$work/stage/memscale/"
export PYTHONPATH=$work/stage PYTHONDONTWRITEBYTECODE=1

results=$root/bench/results/c.csv
processor=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
commit=$(git -C "$root" rev-parse --short=12 HEAD 2>/dev/null || true)
[ -z "$(git -C "$root" status --porcelain -uno 2>/dev/null)" ] || commit=$commit+
compiler=$(meson introspect --compilers "$work" | "$python" -c \
  'import json, sys; made = json.load(sys.stdin)["host"]["c"]; print(made["id"], made["version"])')
run_c() { # program, its arguments: prints rows "bench,case,kind,number,…" and appends them
  echo "== $1"
  if [ -n "$dry" ]; then
    "$work/bench/c/$@"
    return
  fi
  [ -f "$results" ] || echo "date,commit,machine,cores,compiler,bench,case,kind,numbers" >"$results"
  # what the numbers mean, each program's opening comment tells; that of a snapshot has neither case nor kind
  "$work/bench/c/$1" --csv "${@:2}" | sed -u 's/^snapshot,/snapshot,pickle,load,/' | while IFS= read -r row; do
    echo "$row"
    numbers=$(cut -d, -f4- <<<"$row" | tr , ' ')
    printf '%s,%s,"%s",%s,%s,%s,%s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$commit" "$processor" "$(nproc)" "$compiler" \
      "$(cut -d, -f1-3 <<<"$row")" "$numbers" >>"$results"
  done
}
run_c bench_sim
run_c bench_decide
run_c bench_optimal "$([ -n "$quick" ] && echo 0.1 || echo 2)"
run_c bench_offload_parts "$([ -n "$quick" ] && echo 64 || echo 512)" "$work"
run_c bench_optim "$([ -n "$quick" ] && echo 64 || echo 512)" 2
run_c bench_offload "$([ -n "$quick" ] && echo 64 || echo 512)" "$work"
run_c bench_snapshot "$([ -n "$quick" ] && echo 64 || echo 1024)" "$work/snapshot.pickle"

cd "$root/bench/python"
echo "== startup"
"$python" startup.py $dry
echo "== predict_speed"
"$python" predict_speed.py $dry ${quick:+--runs 1 --model gpt2-medium}
echo "== truth"
"$python" truth.py $dry $quick
echo "== frontier"
"$python" frontier.py $dry ${quick:+--runs 5 --dropout 0}
if [ -z "$quick" ]; then
  echo "== step_time"
  "$python" step_time.py $dry
fi
failed=
check() { # these compare with what must hold: the rest still runs, and the exit status tells at the end
  echo "== $1"
  "$python" "$@" $dry || failed="$failed $1"
}
check evaluation.py $quick
check budgets.py $quick
check by_hand.py $quick
check tuner.py $quick
check batch_sampler.py ${quick:+--rounds 1}
check selective.py $quick
check offload_hooks.py
check fingerprint.py ${quick:+--rounds 3}
check offload_run.py ${quick:+gpt2 --rounds 0}
check optimizer_step.py ${quick:+--rounds 3}
check optimizer_offload.py --directory "$work" ${quick:+--batch 1 --rounds 1}
check small_budgets.py --directory "$work" ${quick:+--mib 48 --steps 2}
check checkpoint_overhead.py ${quick:+--rounds 20}
if [ -x "$work/server/memscale-server" ]; then
  check server.py "$work/server/memscale-server" --directory "$work" \
    ${quick:+--runs 1000 --points 100000 --watchers 100}
else
  echo "== server.py: left out, memscale-server was not built: its libraries are missing"
fi
if [ -z "$quick" ]; then
  check loss_tile.py
  check mlp_tile.py
  check attention_tile.py
  check optimizer_convergence.py
  check planning_share.py
fi
if [ -n "$quick" ]; then
  echo "== sac_ilp.py: left out"
elif "$python" -c 'import pulp, pwlf' 2>/dev/null; then
  check sac_ilp.py
else
  echo "== sac_ilp.py: left out, it needs: pip install pulp pwlf"
fi
echo "== published"
case $all$dry in
  --all) "$python" ../published/run.py --csv ;;
  --all--dry) "$python" ../published/run.py ;;
  *) "$python" ../published/run.py --quick ;;
esac
if [ -z "$quick" ]; then
  echo "== scratch"
  "$python" scratch.py $dry
  check library_memory.py
fi
[ -z "$failed" ] || { echo "failed:$failed" >&2 && exit 1; }
