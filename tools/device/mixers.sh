#!/bin/sh
# Builds, checks and times the kernels of the mixers (Gated DeltaNet, attention) on a Hopper card.
#   tools/device/mixers.sh [OUT_DIR]            everything (the build needs nvcc 13)
#   MIXERS_BENCH=path tools/device/mixers.sh    use a binary built before
set -u
out=${1:-${OUT:-out}}
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
bench=${MIXERS_BENCH:-$out/mixers_bench}
if [ ! -x "$bench" ]; then
  nvcc -std=c++20 -O2 -I"$here/src" -I"$here/tests" -gencode=arch=compute_90a,code=sm_90a -cudart static \
    -o "$bench" "$here/tools/device/mixers_bench.cu" "$here/tests/kernels/mixer_problems.cpp" --threads 2 \
    --split-compile 8 || exit 1
fi
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
timeout 200 "$bench" check > "$out/check.txt" 2>&1 || echo "check failed"
grep -v '^ok' "$out/check.txt"
timeout 300 "$bench" time > "$out/time.txt" 2>&1 || echo "timing failed"
cat "$out/time.txt"
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck synccheck racecheck; do
    timeout 60 compute-sanitizer --tool $tool "$bench" check 2>&1 | tail -1
  done
fi
