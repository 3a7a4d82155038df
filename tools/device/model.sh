#!/bin/sh
# Builds, checks and measures whole models on one GPU in one call, planned for eight minutes without the build.
#   tools/device/model.sh [OUT_DIR]            everything (the build needs what README.md names; it has a time limit of its own)
#   BINARIES=folder tools/device/model.sh      with `fourfold`, `cuda_backend_test`, `cuda_op_table_test` and `cuda_test` built
#                                              elsewhere, and the shared libraries they need
#   PARTS="check demo 35B many 122B" (default: all of these, in this order; and "figures", the rows of docs/cuda.md in few lines
#   each, "emulated", "ops", "tune"); BUILD_SECONDS: limit of the build; MIXERS_BENCH: binary of mixers.sh, for "figures"
# Every part prints its figures; all output is kept in OUT_DIR. A part that fails is named, and the others still run.
set -u
out=${1:-${OUT:-out}}
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
bin=${BINARIES:-}
if [ -z "$bin" ]; then
  bin=$out/build/bin
  timeout "${BUILD_SECONDS:-400}" sh -c "cmake -S '$here' -B '$out/build' -G Ninja -DCMAKE_BUILD_TYPE=Release \
    && cmake --build '$out/build' --target fourfold cuda_backend_test cuda_op_table_test cuda_test" > "$out/build.txt" 2>&1 ||
    { tail -n 20 "$out/build.txt"; exit 1; }
  mkdir -p "$bin"
  find "$out/build" -type f \( -name cuda_backend_test -o -name cuda_op_table_test -o -name cuda_test -o -name fourfold \) -perm -1 \
    -exec cp -n {} "$bin" \;
fi
export LD_LIBRARY_PATH="$bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FOURFOLD_KERNELS="${FOURFOLD_KERNELS:-$out/kernels}"
fourfold=$bin/fourfold
begin=$(date +%s)
nvidia-smi --query-gpu=name,driver_version,clocks.sm,memory.total --format=csv,noheader

# run NAME SECONDS COMMAND...: what a command prints, kept in NAME.txt; a failure does not end the others.
run() {
  name=$1
  limit=$2
  shift 2
  echo "== $name ($(($(date +%s) - begin)) s): $*"
  timeout "$limit" "$@" > "$out/$name.txt" 2>&1 || echo "$name: FAILED ($?)"
  tail -n "${LINES_EACH:-14}" "$out/$name.txt"
}
model() {  # model NAME SECONDS SHAPE ARGUMENTS of bench model
  name=$1
  limit=$2
  shape=$3
  shift 3
  run "$name" "$limit" "$fourfold" bench model --dummy "$shape" --device cuda --generate 128 "$@"
}

# figure NAME SECONDS ARGUMENTS of bench model: what it says of whole steps, and of its ceilings.
figure() {
  name=$1
  limit=$2
  shift 2
  LINES_EACH=0 run "$name" "$limit" "$fourfold" bench model --device cuda --generate 128 "$@"
  grep -E '^measured|^decode|^prefill|^verif|^draft|back to back|through the engine|round|error' "$out/$name.txt"
}

for part in ${PARTS:-check demo 35B many 122B}; do
  case $part in
    figures)
      for mix in A B C; do figure "35B_${mix}_128" 60 --dummy 35B-A3B --mix $mix --prompt 128; done
      figure 35B_A_2k 60 --dummy 35B-A3B --mix A --prompt 2048 --chunk 2048 --draft 3
      figure 35B_A_8k 60 --dummy 35B-A3B --mix A --prompt 8192 --chunk 8192
      for users in 16 64 256; do
        LINES_EACH=6 run "35B_engine_$users" 90 "$fourfold" bench engine --dummy 35B-A3B --mix A --device cuda --requests "$users" \
          --concurrency "$users" --prompt 2048 --generate 128 --chunk 8192
      done
      if [ "$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)" -gt 100000 ]; then
        figure 122B_C_8k 120 --dummy 122B-A10B --mix C --prompt 8192 --chunk 8192
      fi
      if [ -n "${MIXERS_BENCH:-}" ]; then LINES_EACH=200 run mixers 120 "$MIXERS_BENCH" time; fi
      ;;
    check)
      # The whole model against the CPU reference, and the same bits twice; then each operation.
      run backend_test 120 "$bin/cuda_backend_test"
      run op_table 120 "$bin/cuda_op_table_test"
      # Every kernel of a large model by its self-test.
      run kernels_check 120 "$fourfold" bench kernels --check --model 35B-A3B
      run eval 60 "$fourfold" eval --device cuda --parallel 32
      run eval_drafts 30 "$fourfold" eval --device cuda --parallel 32 --limit 20 --draft 3
      run eval_fp8 30 "$fourfold" eval --device cuda --parallel 32 --kv-cache-dtype fp8
      ;;
    ops)
      # Every operation by itself, for few sequences, many, and a prompt.
      LINES_EACH=60 run kernels_ops 180 "$fourfold" bench kernels --ops --model 35B-A3B
      ;;
    tune)
      # Tiles of products in whole steps; what wins is printed, and not stored.
      run tune_products 240 "$fourfold" tune --products --model 35B-A3B --dry-run
      ;;
    emulated)
      # The kernels of cards that are not here, on this one and within their shared memory: a check, no measurement.
      run emulated_test 120 "$bin/cuda_backend_test" --gtest_filter='*/As*'
      run emulated_eval 60 "$fourfold" eval --device cuda --emulate rtx-pro-6000 --parallel 32 --limit 40
      ;;
    demo)
      # Start to the end of a short answer with a warm store, then speeds with and without drafts.
      run first_answer 30 sh -c "time '$fourfold' run --device cuda --max-tokens 1 'Hello'"
      run demo_speed 30 "$fourfold" bench model "$here/models/demo" --device cuda --prompt 128 --generate 128 --draft 3
      for draft in 0 3 auto; do
        run "demo_prompts_$draft" 30 "$fourfold" bench engine "$here/models/demo" --device cuda --prompts \
          "$here/models/demo/eval/arithmetic.jsonl" --requests 64 --concurrency 1 --draft "$draft"
      done
      ;;
    35B)
      model 35B_128 60 35B-A3B --prompt 128
      model 35B_8k 60 35B-A3B --prompt 8192 --chunk 8192
      model 35B_drafts 60 35B-A3B --prompt 128 --draft 3
      ;;
    many)
      for users in 64 256; do
        run "35B_users_$users" 90 "$fourfold" bench engine --dummy 35B-A3B --device cuda --requests "$users" \
          --concurrency "$users" --prompt 2048 --generate 128 --chunk 8192
      done
      ;;
    122B)
      model 122B_128 120 122B-A10B --prompt 128
      ;;
    *)
      echo "$part: no such part"
      ;;
  esac
done
echo "== done ($(($(date +%s) - begin)) s)"
