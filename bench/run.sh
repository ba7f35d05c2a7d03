#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds a release and runs all benchmarks: bench/run.sh [--quick] [--dry]
#
# The C benchmarks' rows are appended to bench/results/c.csv, the Python scripts append to a file each. --quick
# leaves out what takes longest, --dry appends nothing. The build goes to $MEMSCALE_BENCH_BUILD, else to a
# temporary folder.
# Python: $PYTHON (python3), with torch and transformers.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
quick= dry=
for word in "$@"; do
  case $word in
    --quick) quick=--quick ;;
    --dry) dry=--dry ;;
    *) sed -n '4,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
work=${MEMSCALE_BENCH_BUILD:-$(mktemp -d)}

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
for program in bench_sim bench_decide; do
  echo "== $program"
  if [ -n "$dry" ]; then
    "$work/bench/c/$program"
    continue
  fi
  [ -f "$results" ] || echo "date,commit,machine,cores,compiler,bench,case,kind,numbers" >"$results"
  "$work/bench/c/$program" --csv | while IFS= read -r row; do
    echo "$row"
    # bench,case,kind and then numbers, whose meaning each program's opening comment gives
    numbers=$(cut -d, -f4- <<<"$row" | tr , ' ')
    printf '%s,%s,"%s",%s,%s,%s,%s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$commit" "$processor" "$(nproc)" "$compiler" \
      "$(cut -d, -f1-3 <<<"$row")" "$numbers" >>"$results"
  done
done

cd "$root/bench/python"
echo "== startup"
"$python" startup.py $dry
echo "== truth"
"$python" truth.py $dry $quick
echo "== frontier"
"$python" frontier.py $dry ${quick:+--runs 5 --dropout 0}
if [ -z "$quick" ]; then
  echo "== scratch"
  "$python" scratch.py $dry
fi
