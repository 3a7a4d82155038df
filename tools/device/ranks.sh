#!/bin/sh
# Checks and measures models split over several GPUs, in one call on a machine with two or more.
#   BINARIES=folder tools/device/ranks.sh [OUT_DIR]   with `fourfold` built elsewhere, and the shared libraries it needs
#   PARTS="comm demo ways shared load 35B 397B" (default: all, in this order; check and 35B_split are short forms of demo
#   and 35B; 397B_experts has whole experts on each rank); RANKS (2); LAYERS_397B: fewer layers of it; FOLDER (/dev/shm)
#   has room for 55 GB of weights to load, LAYERS_LOAD (10; 60: all of it, 239 GB)
# Every part prints its figures; all output is kept in OUT_DIR. A part that fails is named, and the others still run.
set -u
out=${1:-${OUT:-out}}
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
bin=${BINARIES:?folder with fourfold}
ranks=${RANKS:-2}
nccl=$(find "$bin" /usr /opt -name 'libnccl.so.2' 2> /dev/null | head -n 1)
export LD_LIBRARY_PATH="$bin${nccl:+:${nccl%/*}}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FOURFOLD_KERNELS="${FOURFOLD_KERNELS:-$out/kernels}"
fourfold=$bin/fourfold
begin=$(date +%s)
nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader
nvidia-smi topo -m | head -n 6

# run NAME SECONDS COMMAND...: what a command prints, kept in NAME.txt; a failure does not end the others.
run() {
  name=$1
  limit=$2
  shift 2
  echo "== $name ($(($(date +%s) - begin)) s): $*"
  failed=no
  if ! timeout "$limit" "$@" > "$out/$name.txt" 2>&1; then
    failed=yes
    echo "$name: FAILED"
  fi
  tail -n "${LINES_EACH:-30}" "$out/$name.txt"
}
split="--device cuda --tensor-parallel-size $ranks"

for part in ${PARTS:-comm demo ways shared load 35B 397B}; do
  case $part in
    comm)
      for hidden in 4096 2048; do
        run "comm_$hidden" 40 "$fourfold" bench comm $split --hidden "$hidden" --tokens 1,2,8,16,64,128,512,2048,8192
        if [ "$failed" = yes ] && [ -z "${FOURFOLD_SUMS:-}" ]; then
          echo "sums have flags from here on"
          export FOURFOLD_SUMS=flags
        fi
      done
      ;;
    demo)
      run eval 60 "$fourfold" eval $split --parallel 32
      run eval_drafts 40 "$fourfold" eval $split --parallel 32 --limit 20 --draft 3
      run eval_experts 40 "$fourfold" eval $split --parallel 32 --limit 20 --enable-expert-parallel
      run answer 20 "$fourfold" run $split --max-tokens 40 'What is 17 + 25?'
      ;;
    ways)
      # Whole models with sums in every way, and with sums that are compared.
      asked=${FOURFOLD_SUMS:-}
      for way in words flags two-shot nccl host; do
        export FOURFOLD_SUMS=$way
        run "ways_$way" 40 "$fourfold" eval $split --parallel 32 --limit 10
      done
      FOURFOLD_SUMS=two-shot
      run ways_checked 40 "$fourfold" eval $split --parallel 32 --limit 10 --draft 3 --check-sums 2
      FOURFOLD_SUMS=$asked
      [ -n "$asked" ] || unset FOURFOLD_SUMS
      ;;
    check)
      run check 60 "$fourfold" eval $split --parallel 32 --limit 20
      run check_drafts 30 "$fourfold" eval $split --parallel 32 --limit 10 --draft 3
      ;;
    load)
      weights=${FOLDER:-/dev/shm}/fourfold-ranks-$$
      trap 'rm -rf "$weights"' EXIT
      LINES_EACH=1 run generate 300 "$fourfold" generate "$weights" --shape 397B-A17B --layers "${LAYERS_LOAD:-10}" \
        --format modelopt-nvfp4 --shards 8
      run load 60 "$fourfold" bench load "$weights" $split --repeats 4
      rm -rf "$weights"
      ;;
    shared)
      # Two ranks on one card: for tests on machines that have one.
      run shared_eval 60 "$fourfold" eval --device cuda:0 --tensor-parallel-size "$ranks" --parallel 32 --limit 20
      ;;
    35B)
      run 35B_one 60 "$fourfold" bench model --dummy 35B-A3B --mix A --device cuda --prompt 128 --generate 128
      run 35B_split 60 "$fourfold" bench model --dummy 35B-A3B --mix A $split --prompt 128 --generate 128
      run 35B_experts 60 "$fourfold" bench model --dummy 35B-A3B --mix A $split --enable-expert-parallel --prompt 128 \
        --generate 128
      ;;
    35B_split)
      run 35B_split 60 "$fourfold" bench model --dummy 35B-A3B --mix A $split --prompt 128 --generate 128
      ;;
    397B)
      run 397B 240 "$fourfold" bench model --dummy 397B-A17B --mix C $split --prompt 8192 --chunk 8192 --generate 128 \
        --users 16 ${LAYERS_397B:+--layers "$LAYERS_397B"}
      ;;
    397B_experts)
      run 397B_experts 240 "$fourfold" bench model --dummy 397B-A17B --mix C $split --enable-expert-parallel \
        --prompt 8192 --chunk 8192 --generate 128 ${LAYERS_397B:+--layers "$LAYERS_397B"}
      ;;
    *)
      echo "$part: no such part"
      ;;
  esac
done
echo "== done ($(($(date +%s) - begin)) s)"
