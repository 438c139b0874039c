#!/bin/sh
# One command for every node:   sh train.sh tasks/<task>.py config.yaml [key=value ...]
# It starts a rank per device with torchrun; its exit status is torchrun's. `sh train.sh tasks/<task>.py --help` shows all keys.
#   NNODES          nodes of the job (1)
#   NODE_RANK       this node's number, 0 .. NNODES-1 (0)
#   MASTER_ADDR     name or address of node 0, the same on every node (needed where NNODES > 1)
#   MASTER_PORT     a port of node 0 that all nodes reach (29500)
#   NPROC_PER_NODE  ranks on this node (the visible GPUs; 1 on a CPU)
#   TORCHRUN_ARGS   further options of torchrun, such as "--log-dir logs --redirects 3"
# POSIX sh only: it runs under dash, bash and busybox.
set -eu

die() { echo "train.sh: $1" >&2; exit 2; }

# Entries of a device list: "0,1" has 2; "" and "-1", which hide all devices, have none.
entries() { case $1 in '' | -1) echo 0 ;; *) echo "$1" | tr ',' '\n' | grep -c . || : ;; esac; }

gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then entries "$CUDA_VISIBLE_DEVICES"
  elif [ -n "${HIP_VISIBLE_DEVICES+set}" ]; then entries "$HIP_VISIBLE_DEVICES"
  elif n=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); then echo "$n"
  elif n=$(rocm-smi --showid --csv 2>/dev/null | grep -c '^card'); then echo "$n"
  else echo 0; fi
}

# THE ONE PLACE FOR LAUNCHERS. The plain variables win; a branch that maps another launcher's variables to them
# (Slurm, SkyPilot, Kubeflow, ...) belongs before the defaults below, and nowhere else.
cluster() {
  NNODES=${NNODES:-1}
  NODE_RANK=${NODE_RANK:-0}
  MASTER_PORT=${MASTER_PORT:-29500}
  devices=$(gpus)
  if [ "$devices" -gt 0 ]; then NPROC_PER_NODE=${NPROC_PER_NODE:-$devices}; else NPROC_PER_NODE=${NPROC_PER_NODE:-1}; fi
}

number() { case $2 in '' | *[!0-9]*) die "$1=$2: expected a whole number, such as $1=$3" ;; esac; }

[ $# -ge 1 ] || die "no task given; expected: sh train.sh tasks/<task>.py config.yaml [key=value ...]"
case $1 in -h | --help) sed -n '2,9s/^# //p' "$0" && exit 0 ;; esac
[ -f "$1" ] || die "task file $1 does not exist; expected a file such as tasks/train_flowgrpo.py"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
for argument in "$@"; do
  case $argument in -h | --help) exec python3 "$@" ;; esac
done
cluster
number NNODES "$NNODES" 2
number NODE_RANK "$NODE_RANK" 0
number MASTER_PORT "$MASTER_PORT" 29500
number NPROC_PER_NODE "$NPROC_PER_NODE" 8
[ "$NNODES" -ge 1 ] || die "NNODES=$NNODES: expected at least 1"
[ "$NPROC_PER_NODE" -ge 1 ] || die "NPROC_PER_NODE=$NPROC_PER_NODE: expected at least 1"
[ "$NODE_RANK" -lt "$NNODES" ] || die "NODE_RANK=$NODE_RANK is not below NNODES=$NNODES; nodes are numbered from 0"
[ "$NNODES" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] || die "NNODES=$NNODES needs MASTER_ADDR, the name or address of node 0"
command -v torchrun >/dev/null || die "torchrun is not on PATH; activate the environment that phalanx is installed in"
[ "$devices" -gt 0 ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # a core a rank; several threads each would fight
# shellcheck disable=SC2086 # TORCHRUN_ARGS is several words
if [ "$NNODES" -eq 1 ]; then set -- --standalone --nnodes 1 --nproc-per-node "$NPROC_PER_NODE" ${TORCHRUN_ARGS:-} "$@"
else set -- --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" --master-addr "$MASTER_ADDR" \
  --master-port "$MASTER_PORT" ${TORCHRUN_ARGS:-} "$@"; fi
exec torchrun "$@"
