#!/bin/sh
# Builds, checks and times the kernels of dense products, norms and the router on a machine with a GPU and nvcc.
#   tools/device/products.sh [OUT_DIR]                          everything
#   PRODUCTS_BENCH=path tools/device/products.sh [OUT_DIR]      with a binary built before
#   ARCH=90a (default), ...: the architecture to build for
set -u
out=${1:-${OUT:-out}}
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
bench=${PRODUCTS_BENCH:-$out/products_bench}
arch=${ARCH:-90a}
if [ ! -x "$bench" ]; then
  sources="$here/src/cuda/gemm/packed_matrix.cpp $here/src/ops/tensor.cpp $here/src/nvfp4/quantize.cpp $here/src/base/check.cpp"
  # shellcheck disable=SC2086
  nvcc -std=c++20 -O2 -I"$here" -I"$here/src" -I"$here/tests" --expt-relaxed-constexpr -DFMT_HEADER_ONLY \
    -gencode="arch=compute_$arch,code=sm_$arch" -cudart static --threads 2 --split-compile 8 -o "$bench" \
    "$here/tools/device/products_bench.cu" $sources || exit 1
fi
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader
timeout 120 "$bench" --check > "$out/check.txt" 2>&1 || echo "check failed"
grep -v '^ok' "$out/check.txt"
timeout 120 "$bench" --time | tee "$out/times.txt"
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck synccheck racecheck; do
    timeout 100 compute-sanitizer --tool $tool "$bench" --check --small 2>&1 | tail -1
  done
fi
