#!/bin/sh
# Checks, tunes and measures the expert layer on a machine with a GPU, from binaries that were built elsewhere.
#   tools/device/moe_layer.sh BINARIES [OUT_DIR]
# SANITIZE="memcheck synccheck racecheck" runs compute-sanitizer's tools over whole layers as well.
# BINARIES: a folder with `fourfold`, `cuda_test` and the shared libraries they need (libfmt, libpcre2-8, libutf8proc).
set -u
bin=${1:?wanted the folder of the binaries}
out=${2:-${OUT:-out}}
mkdir -p "$out"
export LD_LIBRARY_PATH="$bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FOURFOLD_KERNELS="${FOURFOLD_KERNELS:-$out/kernels}"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
timeout 240 "$bin/cuda_test" > "$out/cuda_test.txt" 2>&1 || echo "cuda_test failed"
grep -E "^\[  (PASSED|FAILED|SKIPPED)" "$out/cuda_test.txt"
for tool in ${SANITIZE:-}; do
  # A small shape and a graph; all hazards of the unsorted kernels would not end (docs/kernels/moe_hopper.md).
  timeout 200 compute-sanitizer --tool "$tool" $([ "$tool" = racecheck ] && echo --racecheck-report analysis) \
    "$bin/cuda_test" --gtest_filter='Layer.RunsInAGraph' > "$out/$tool.txt" 2>&1
  echo "$tool: $(tail -n 1 "$out/$tool.txt")"
done
for model in ${MODELS:-35B-A3B 122B-A10B 397B-A17B}; do
  timeout 120 "$bin/fourfold" tune --model "$model" --top "${TOP:-6}" --json > "$out/tune_$model.json" || exit 1
  timeout 60 "$bin/fourfold" bench kernels --model "$model" --json > "$out/bench_$model.json" || exit 1
  timeout 60 "$bin/fourfold" bench kernels --model "$model"
  # Another card's kernels, multiplications emulated: right or wrong, not how fast.
  timeout 60 "$bin/fourfold" bench kernels --model "$model" --emulate rtx-pro-6000 --activations nvfp4 --tokens 1,64,512 --replays 1
done
