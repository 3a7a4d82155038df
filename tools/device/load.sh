#!/bin/sh
# How fast a checkpoint of 20 GB comes from the page cache onto one GPU, beside the rate of copies from page-locked memory
# in the same run, and where the time goes; then a smaller one, with what is right and wrong with a memory plan. Planned for
# three minutes.
#   BINARIES=folder tools/device/load.sh [OUT_DIR]      `fourfold` and the shared libraries that it needs
# FOLDER: where the checkpoint goes (default /dev/shm: a file system in memory is read as the page cache is)
set -u
out=${1:-${OUT:-out}}
mkdir -p "$out"
bin=${BINARIES:?the folder with fourfold}
folder=${FOLDER:-/dev/shm}/fourfold-load-$$
export LD_LIBRARY_PATH="$bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FOURFOLD_KERNELS="${FOURFOLD_KERNELS:-$out/kernels}"
fourfold=$bin/fourfold
trap 'rm -rf "$folder"' EXIT
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader
nproc
free -g | sed -n 2p
run() {
  name=$1
  shift
  echo "== $name: $*"
  timeout 100 "$@" > "$out/$name.txt" 2>&1 || echo "$name: FAILED ($?)"
  tail -n 40 "$out/$name.txt"
}
run generate "$fourfold" generate "$folder/35B" --shape 35B-A3B --format modelopt-nvfp4 --shards 4
# Where the time goes: by whom it is spent stands in src/cuda/device/load_times.h. Then more and fewer readers than
# processors, and without the index, which is half of what is read before weights are.
run load "$fourfold" bench load "$folder/35B" --device cuda --repeats 6
run load_json "$fourfold" bench load "$folder/35B" --device cuda --repeats 6 --json
for threads in 8 12 24; do
  run "load_$threads" "$fourfold" bench load "$folder/35B" --device cuda --repeats 3 --threads "$threads"
done
mv "$folder/35B/model.safetensors.index.json" "$folder/35B/index.aside"
run load_without_index "$fourfold" bench load "$folder/35B" --device cuda --repeats 3
mv "$folder/35B/index.aside" "$folder/35B/model.safetensors.index.json"
run load_without_copy env FOURFOLD_DRAFT_HEAD=stored "$fourfold" bench load "$folder/35B" --device cuda --repeats 3
rm -rf "$folder"
# Planned against taken, with drafts, and with many sequences.
run model "$fourfold" bench model --dummy 35B-A3B --layers 8 --mix A --device cuda --prompt 2048 --chunk 2048 --generate 32 --users 64 --draft 3
run engine "$fourfold" bench engine --dummy 35B-A3B --layers 8 --mix A --device cuda --requests 64 --concurrency 32 --prompt 512 --generate 64
run refused "$fourfold" bench engine --dummy 35B-A3B --layers 8 --device cuda --requests 64 --concurrency 32 --gpu-memory-utilization 0.03
