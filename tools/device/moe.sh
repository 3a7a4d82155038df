#!/bin/sh
# Builds, checks and times the expert-layer kernels on a Hopper card.
#   tools/device/moe.sh [OUT_DIR]        everything (build needs nvcc 13)
#   MOE_BENCH=path tools/device/moe.sh   use a binary built before
set -u
out=${1:-${OUT:-out}}
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
bench=${MOE_BENCH:-$out/moe_bench}
if [ ! -x "$bench" ]; then
  nvcc -std=c++20 -O2 -I"$here" -I"$here/src" -gencode=arch=compute_90a,code=sm_90a -cudart static \
    -o "$bench" "$here/bench/gpu/moe_bench.cu" "$here/bench/gpu/moe_prefill.cu" --threads 2 --split-compile 8 || exit 1
fi
nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.draw --format=csv,noheader
timeout 200 "$bench" --check --shape 35B,122B,397B,e512h2560i640,e512h2560i320,e128h2688i1856,i704,k16,k1 \
  --tokens 1,2,7,8,9,63,300,1100 > "$out/check.txt" 2>&1 || echo "check failed"
grep -v '^ok' "$out/check.txt"
timeout 300 "$bench" --shape 35B,122B,397B --tokens 1,8,64,512,8192 --json "$out/moe.json" || exit 1
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck synccheck racecheck; do
    timeout 60 compute-sanitizer --tool $tool "$bench" --check --shape k1 --tokens 1,9,300 2>&1 | tail -1
  done
fi
