#!/bin/sh
# One command for every node:   sh train.sh tasks/<task>.py config.yaml [key=value ...]
# It starts one rank per device with torchrun. After a task, --help lists all keys, and --plan shows what the job would do.
# Slurm, SkyPilot, dstack, Kubernetes and mpirun provide most of these values; each variable that is set overrides them:
#   NNODES          number of nodes (1), or a range such as 2:4 within which nodes may leave and rejoin
#   NODE_RANK       this node's number, 0 .. NNODES-1 (0)
#   MASTER_ADDR     name or address of node 0, the same on every node (needed where NNODES > 1)
#   MASTER_PORT     a port of node 0 that all nodes reach (29500)
#   NPROC_PER_NODE  ranks on this node (the visible GPUs; 1 on a CPU)
#   MAX_RESTARTS    how often failed ranks are restarted (0; 3 with a range or IN_PLACE)
#   IN_PLACE        1: when a node is lost, the others go on in their processes (docs/faults.md)
#   SPARES          with IN_PLACE, nodes that wait for the place of a lost one, with NODE_RANK from NNODES on (0)
#   STORE_ADDR      with IN_PLACE, host:port of a store that no node keeps (docs/faults.md)
#   GRACE_S         seconds for a checkpoint when the job is told to stop (30)
#   LOG_DIR         a folder for each rank's output; the terminal then shows only each node's first rank
#   RDZV_ID         the job's name at the rendezvous, for a range or restarts (the scheduler's job id, or phalanx)
#   RDZV_CONF       further --rdzv-conf of torchrun, for a range or restarts
#   TORCHRUN_ARGS   further options of torchrun
#   OMP_NUM_THREADS threads of each rank on the CPU (its share of the node's cores with GPUs; 1 on CPUs)
# The exit status is torchrun's; 143 or 130 if the job was told to stop (SIGTERM, Ctrl-C); 2 for a mistake in the above.
# POSIX sh only: it runs under dash, bash and busybox.
set -eu
(exec 3<&0) 2>/dev/null || exec </dev/null # a supervisor may have closed stdin

die() { echo "train.sh: $1" >&2; exit 2; }
number() { case $2 in '' | *[!0-9]*) die "$1=$2: expected an integer, such as $1=$3" ;; esac; }

case $0 in */*) here=${0%/*} ;; *) here=. ;; esac
# shellcheck source=launch/cluster.sh
. "$here/launch/cluster.sh"

[ $# -ge 1 ] || die "no task given; expected: sh train.sh tasks/<task>.py config.yaml [key=value ...]"
case $1 in -h | --help) sed -n '2,20s/^# //p' "$0" && exit 0 ;; esac
[ -f "$1" ] || die "task file $1 does not exist; expected a file such as tasks/train_flowgrpo.py"
command -v torchrun >/dev/null || die "torchrun is not on PATH; activate the environment that phalanx is installed in"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
plan=''
for argument in "$@"; do
  case $argument in
    -h | --help) exec python3 "$@" ;;
    --plan | plan=true) plan=1 ;;
  esac
done

cluster
min=${NNODES%:*} max=${NNODES#*:}
case $min:$max in
  *[!0-9:]* | *:*:* | :* | *:) die "NNODES=$NNODES: expected a number or a range, such as NNODES=2 or NNODES=2:4" ;;
esac
[ "$min" -ge 1 ] || die "NNODES=$NNODES: expected at least 1"
[ "$min" -le "$max" ] || die "NNODES=$NNODES: expected the smaller number first, such as NNODES=$max:$min"
[ -z "${IN_PLACE:=}" ] || [ "$IN_PLACE$direct/$min" = "1/$max" ] && [ "$IN_PLACE/$max" != 1/1 ] ||
  die "IN_PLACE=$IN_PLACE: expected 1, with a fixed number of nodes, at least 2, each with one torchrun"
if [ "$min" -lt "$max" ] || [ -n "$IN_PLACE" ]; then : "${MAX_RESTARTS:=3}"; else : "${MAX_RESTARTS:=0}"; fi
number NODE_RANK "$NODE_RANK" 0
number MASTER_PORT "$MASTER_PORT" 29500
number NPROC_PER_NODE "$NPROC_PER_NODE" 8
number MAX_RESTARTS "$MAX_RESTARTS" 3
number GRACE_S "${GRACE_S:=30}" 30
[ "$NPROC_PER_NODE" -ge 1 ] || die "NPROC_PER_NODE=$NPROC_PER_NODE: expected at least 1"
[ "$NODE_RANK" -lt $((max + SPARES)) ] ||
  die "NODE_RANK=$NODE_RANK is not below NNODES=$max${IN_PLACE:+ and SPARES=$SPARES more}; nodes are numbered from 0"

if [ -n "$fan_out" ] && [ -z "$plan" ]; then
  if command -v srun >/dev/null; then
    export MASTER_ADDR MASTER_PORT
    case $NNODES/$IN_PLACE in
      *:* | */1) set -- --kill-on-bad-exit=0 --no-kill sh "$0" "$@" ;;
      *) set -- --kill-on-bad-exit=1 sh "$0" "$@" ;;
    esac
    exec srun --nodes="$fan_out" --ntasks="$fan_out" --ntasks-per-node=1 "$@"
  fi
  [ "$fan_out" -eq 1 ] || die "the job has $fan_out Slurm nodes, but srun is not on PATH; start this with srun"
fi
export NNODES NPROC_PER_NODE IN_PLACE
# Variables of other launchers must reach neither torchrun, whose defaults are PET_*, nor the ranks.
[ -n "$direct" ] || unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
for name in $(env | sed -n 's/^\(PET_[A-Z_]*\)=.*/\1/p'); do unset "$name"; done
[ -z "$plan" ] || exec python3 "$@"

[ "$max" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] || die "NNODES=$NNODES needs MASTER_ADDR, the name or address of node 0"
share_node
# shellcheck disable=SC3045 # the store has three connections to each rank; a shell without these options keeps its limit
{ ulimit -Sn "$(ulimit -Hn)"; } 2>/dev/null || :
trap '' USR1 USR2 # Slurm sends them to every process of a step; the ranks handle USR1 and print their stacks
if [ -n "$direct" ]; then
  export MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}" MASTER_PORT
  exec python3 "$@"
fi

# shellcheck disable=SC2086 # TORCHRUN_ARGS is several words
set -- ${TORCHRUN_ARGS:-} "$@"
if [ -n "${LOG_DIR:-}" ]; then set -- --log-dir "$LOG_DIR/node_$NODE_RANK" --tee 3 --local-ranks-filter 0 "$@"; fi
set -- --nproc-per-node "$NPROC_PER_NODE" --max-restarts "$MAX_RESTARTS" --signals-to-handle SIGTERM "$@"
if [ "$min" -lt "$max" ] || [ "$MAX_RESTARTS" -gt 0 ]; then
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # restarted ranks must not find the keys of the previous ones
fi
# in place, each node has a torchrun of its own, which needs no other one
[ -z "$IN_PLACE" ] || export PHALANX_STORE="${STORE_ADDR:-$MASTER_ADDR:$MASTER_PORT}" NODE_RANK SPARES STORE_ADDR
if [ "$max" -eq 1 ] || [ -n "$IN_PLACE" ]; then set -- --standalone --nnodes 1 "$@"
elif [ "$min" -eq "$max" ] && [ "$MAX_RESTARTS" -eq 0 ]; then
  set -- --nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"
else # node 0 runs the store, and each node gives the address at which others reach it, so no host names are needed
  if [ "$NODE_RANK" -eq 0 ]; then first=true address=$MASTER_ADDR; else first=false address=$(own_address); fi
  conf=is_host=$first,keep_alive_interval=3,keep_alive_max_attempt=5,last_call_timeout=15${RDZV_CONF:+,$RDZV_CONF}
  set -- --nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-conf "$conf" \
    --rdzv-id "${RDZV_ID:-${SLURM_JOB_ID:-phalanx}}" ${address:+--local-addr "$address"} "$@"
fi

# torchrun gets a single SIGTERM, from here, because at a third signal it would not wait for its ranks' checkpoint. So
# the terminal's signals do not reach it, and closing the terminal stops the job in good order.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="$GRACE_S"
child='' stopped=''
# shellcheck disable=SC2317,SC2329 # the traps call it
stop() {
  [ -n "$stopped" ] || kill -TERM "$child" 2>/dev/null || :
  stopped=${stopped:-$1}
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 131' QUIT
trap 'stop 143' TERM
exec 3<&0 # a command in the background would read /dev/null, but a breakpoint needs the terminal
(trap '' HUP INT QUIT && exec python3 -m phalanx.run.launch "$@" <&3 3<&-) &
child=$!; [ -z "$stopped" ] || kill -TERM "$child"
status=0; wait "$child" || status=$?
while kill -0 "$child" 2>/dev/null; do wait "$child" || :; done # a signal interrupted wait, and torchrun is about to end
exit "${stopped:-$status}"
