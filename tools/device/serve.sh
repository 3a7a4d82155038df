#!/bin/sh
# What clients of `serve` get on one GPU, beside what the engine alone does with the same load: a generated checkpoint of the
# 35B shape (random weights, mix A), answers of 128 tokens to long questions, 1 to 256 of them at a time. Planned for six
# minutes.
#   BINARIES=folder tools/device/serve.sh [OUT_DIR]     `fourfold` and the shared libraries that it needs
# STEPS ("2048 8192"): --max-num-batched-tokens, a server each, the last one's for the engine; USERS ("1 16 64 256"): requests at
# a time; CONTEXT (2000): words and figures in front of each question, about five tokens of the demo's tokenizer for two; ANSWER:
# tokens of an answer; FOLDER: where the checkpoint goes (default /dev/shm; 23 GB)
set -u
out=${1:-${OUT:-out}}
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
bin=${BINARIES:?the folder with fourfold}
folder=${FOLDER:-/dev/shm}/fourfold-serve-$$
export LD_LIBRARY_PATH="$bin${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
export FOURFOLD_KERNELS="${FOURFOLD_KERNELS:-$out/kernels}"
fourfold=$bin/fourfold
context=${CONTEXT:-2000}
answer=${ANSWER:-128}
users=${USERS:-1 16 64 256}
begin=$(date +%s)
server=
trap '[ -z "$server" ] || kill -KILL "$server"; rm -rf "$folder"' EXIT
nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader
said() { echo "== $* ($(($(date +%s) - begin)) s)"; }

said generate
timeout 120 "$fourfold" generate "$folder/35B" --shape 35B-A3B --format modelopt-mixed --shards 4 > "$out/generate.txt" 2>&1 ||
  { tail -n 5 "$out/generate.txt"; exit 1; }
python3 -B "$here/tools/device/serve_tokenizer.py" "$here/models/demo" "$folder/35B"

# Processor time of a process so far, in hundredths of a second.
processor_time() { sed 's/.*) //' "/proc/$1/stat" | awk '{ print $12 + $13 }'; }

for step in ${STEPS:-2048 8192}; do
  said "serve, steps of $step"
  "$fourfold" serve "$folder/35B" --device cuda --port 8123 --max-num-seqs 256 --max-num-batched-tokens "$step" \
    --disable-log-requests > "$out/serve_$step.txt" 2>&1 &
  server=$!
  tries=0
  until python3 -c 'import urllib.request as u; u.urlopen("http://127.0.0.1:8123/health", timeout=2)' 2> "$out/health.txt"; do
    tries=$((tries + 1))
    if [ $tries -gt 240 ] || ! kill -0 "$server"; then
      tail -n 20 "$out/serve_$step.txt"
      exit 1
    fi
    sleep 0.5
  done
  said ready
  for n in $users; do
    requests=$((n * 2))
    [ $requests -ge 16 ] || requests=16
    before=$(processor_time "$server")
    timeout 120 "$fourfold" bench serve http://127.0.0.1:8123 --prompts real --context "$context" --concurrency "$n" \
      --requests $requests --warm-up 4 --repeat 1 --max-tokens "$answer" --ignore-eos --out "$out/serve_${step}_$n.json" \
      > "$out/serve_${step}_$n.txt" 2>&1 || echo "FAILED ($?)"
    tail -n "${LINES_EACH:-30}" "$out/serve_${step}_$n.txt"
    echo "processor time of the server: $(($(processor_time "$server") - before)) hundredths of a second"
  done
  kill "$server"
  wait "$server"
  server=
done

# The same number of tokens, without clients.
for n in $users; do
  tokens=$(python3 -c 'import json, sys
cell = json.load(open(sys.argv[1]))["cells"][0]
print(round(cell["total_input_tokens"] / cell["completed"]))' "$out/serve_${step}_$n.json")
  said "engine alone, $n, prompts of $tokens"
  requests=$((n * 2))
  [ $requests -ge 16 ] || requests=16
  timeout 120 "$fourfold" bench engine "$folder/35B" --device cuda --requests $requests --concurrency "$n" --prompt "$tokens" \
    --generate "$answer" --chunk "$step" > "$out/engine_$n.txt" 2>&1 || echo "FAILED ($?)"
  tail -n "${LINES_EACH:-30}" "$out/engine_$n.txt"
done
said done
