#!/bin/sh
# Compares small models of unusual shapes on a GPU with the CPU reference: logits in pieces of several sizes, with an fp8
# cache, split over two ranks on one card, and greedy answers with and without drafts, one at a time and of 5 to 70 requests at
# once: prompts of 1 to 420 tokens that share beginnings, computed beside answers, with log-probabilities of what was chosen and
# of the next best, of some prompts too; the same again in another order, with less room and with drafts. Planned for four
# minutes with 16 processors, kernels compiled at first use included.
#   tools/device/odd_shapes.sh [OUT_DIR]              FOURFOLD: the binary (default: build/release/bin/fourfold)
#   SEED (1) and COUNT (24) say which models; ONLY="3 17": those numbers alone; JOBS: models at the same time
#   DEVICE=cpu: without a GPU, the CPU's fast backend in its place; what the GPU would do is planned for GPU (h200) all the same
#   RANKS_APART=1: the two ranks have a GPU each, and what they share answers the requests, too
#   LIMIT: mean KL that is right (1e-3); SECONDS_ALL: what has not been checked by then has failed (480); KEEP=1: keep the
#   checkpoints (those of models that fail are always kept)
# It needs Python 3 and, on the GPU, NVRTC. OUT_DIR gets a log of every model, with all that the binary printed. A shape that the
# plan refuses, saying what it wants, is counted and drawn again. Exit status 1 if a model failed.
set -u
out=${1:-${OUT:-out}}
here=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$out"
export FOURFOLD="${FOURFOLD:-$here/build/release/bin/fourfold}"
export FOURFOLD_KERNELS="${FOURFOLD_KERNELS:-$out/kernels}"
libraries=$(cd "$(dirname "$FOURFOLD")" && pwd)
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
if [ "${DEVICE:-cuda}" != cpu ]; then
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
fi
exec python3 -B "$here/tools/device/odd_shapes.py" "$out"
