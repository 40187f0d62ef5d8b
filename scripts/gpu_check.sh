#!/usr/bin/env bash
# Every GPU test and benchmark of this repository in one call of under nine minutes.
#
#   bash scripts/gpu_check.sh [REPORT.md]       on a machine with a GPU
#   bash scripts/gpu_check.sh --interpret [REPORT.md]
#                                               try it out on CPU, small, by Triton's interpreter
#
# Needs torch >= 2.11, triton >= 3.6 and this folder; installs nothing. PYTHON names the interpreter.
# Writes one Markdown report. Each section has its own time limit; one that fails or takes too long is
# reported, and the next ones run all the same. Exit code 1 if one failed.
set -uo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
total_s=${GPU_CHECK_TOTAL_S:-530}
if [[ ! $total_s =~ ^[0-9]+$ ]]; then
  echo "error: GPU_CHECK_TOTAL_S=$total_s: must be a whole number of seconds" >&2
  exit 2
fi
export PYTHONPATH="$root:$root/kernels:$root/scripts"

usage() {
  sed -n '2,/^$/s/^#\( \|$\)//p; /^set/q' "$root/scripts/gpu_check.sh"
}

interpret=
report=
for argument in "$@"; do
  case $argument in
    -h | --help)
      usage
      exit 0
      ;;
    --interpret) interpret=1 ;;
    -*)
      echo "error: $argument: unknown option; known: --interpret, --help" >&2
      exit 2
      ;;
    *)
      if [[ $report ]]; then
        echo "error: $argument: one report is written, and $report is named already" >&2
        exit 2
      fi
      report=$argument
      ;;
  esac
done
# Both are meant from where the script was called; the rest runs in the repository.
report=$(realpath -m -- "${report:-$root/outputs/gpu_check.md}") || exit 2
[[ $python != */* ]] || python=$(realpath -s -- "$python")
cd "$root" || exit 2

arch=sm_90
if [[ ! $interpret ]]; then
  arch=$("$python" -c "import torch
print('sm_%d%d' % torch.cuda.get_device_capability() if torch.cuda.is_available() else '')" 2>/dev/null)
  if [[ ! $arch ]]; then
    echo "error: $python has no torch with a CUDA device; --interpret tries the script out without" >&2
    exit 2
  fi
fi
if ! mkdir -p -- "$(dirname -- "$report")" 2>/dev/null || ! : 2>/dev/null >>"$report"; then
  echo "error: $report: the report cannot be written there" >&2
  exit 2
fi
parts=$(mktemp -d) || exit 2
trap 'rm -rf "$parts"' EXIT

failed=0
ran=0

# section NAME LIMIT_S COMMAND...
section() {
  local name=$1 limit_s=$2 begin_s=$SECONDS status result
  shift 2
  ran=$((ran + 1))
  local left_s=$((total_s - SECONDS))
  ((limit_s > left_s)) && limit_s=$left_s
  echo "[$SECONDS s] $name (at most $limit_s s)" >&2
  if ((limit_s <= 0)); then
    status=124
    : >"$parts/output"
  else
    timeout --kill-after=5 "$limit_s" "$@" >"$parts/output" 2>&1
    status=$?
  fi
  case $status in
    0) result="ok" ;;
    124 | 137) result="**out of time**" ;;
    *) result="**failed** ($status)" ;;
  esac
  ((status == 0)) || failed=$((failed + 1))
  echo "| $name | $result | $((SECONDS - begin_s)) |" >>"$parts/summary"
  {
    echo "## $name"
    echo
    echo "\`${*/#$python/python}\`"
    echo
    # Tables stay tables; everything else is shown as it came.
    sed -e 's/^\([^|#]\)/    \1/' "$parts/output"
    echo
  } >>"$parts/details"
}

if [[ $interpret ]]; then
  section "environment" 60 "$python" scripts/gpu_environment.py
  section "kernels, compiled" 200 "$python" scripts/check_kernels.py --arch $arch --dtype bfloat16 \
    --only up_gate/narrow down_scatter/narrow
  export TRITON_INTERPRET=1
  small=(--kernels triton --device cpu --ranks 2 --tokens 9 --dim 16 --expert-dim 16 --experts 4
    --iters 0)
  section "ring, float32" 200 "$python" scripts/check_ring.py "${small[@]}"
  section "ring, bfloat16, deterministic" 200 "$python" scripts/check_ring.py "${small[@]}" \
    --dtype bfloat16 --deterministic
  unset TRITON_INTERPRET
  section "speed" 200 "$python" scripts/bench_kernels.py --interpret --preset qwen3-30b-a3b
else
  section "environment" 30 "$python" scripts/gpu_environment.py
  if [[ $arch =~ ^sm_(80|90|100)$ ]]; then
    section "kernels, compiled" 60 "$python" scripts/check_kernels.py --arch "$arch" \
      --dtype bfloat16,float32
  else
    echo "| kernels, compiled | not run: the check does not know $arch | 0 |" >>"$parts/summary"
  fi
  # Right before fast: small sizes that no tile divides, then a layer as in training.
  section "ring, float32" 45 "$python" scripts/check_ring.py --kernels triton --ranks 1 2 4 \
    --tokens 999 --dim 250 --expert-dim 190 --experts 12 --top-k 3
  section "ring, bfloat16, deterministic" 45 "$python" scripts/check_ring.py --kernels triton \
    --ranks 1 4 --tokens 1024 --dim 512 --expert-dim 384 --experts 16 --top-k 4 --dtype bfloat16 \
    --deterministic
  section "ring, Qwen3-30B's layer" 75 "$python" scripts/check_ring.py --kernels triton \
    --ranks 1 4 --tokens 4096 --preset qwen3-30b-a3b --dtype bfloat16
  section "speed" 200 "$python" scripts/bench_kernels.py
  if "$python" -c "import pytest" 2>/dev/null; then
    section "tests" 120 "$python" scripts/gpu_tests.py
  else
    echo "| tests | not run: pytest is not installed | 0 |" >>"$parts/summary"
  fi
fi

{
  echo "# GPU check"
  echo
  echo "$ran sections, $failed not ok, $SECONDS s${interpret:+; on CPU by the interpreter, so times mean nothing}"
  echo
  echo "| section | result | s |"
  echo "|---|---|---|"
  cat "$parts/summary"
  echo
  cat "$parts/details"
} >"$report"
echo "$ran sections, $failed not ok, $SECONDS s: $report" >&2
((failed == 0))
