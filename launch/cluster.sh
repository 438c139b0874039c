# Sourced by train.sh: what the launcher says, in the plain variables NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and
# NPROC_PER_NODE. Those that are set already win, each for itself. POSIX sh.
# shellcheck shell=sh disable=SC2034 # direct and fan_out are for train.sh

# Entries of a device list: "0,1" has 2; "" and "-1", which hide all devices, have none.
entries() { case $1 in '' | -1) echo 0 ;; *) echo "$1" | tr ',' '\n' | grep -c . || : ;; esac; }

gpus() {
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then entries "$CUDA_VISIBLE_DEVICES"
  elif [ -n "${HIP_VISIBLE_DEVICES+set}" ]; then entries "$HIP_VISIBLE_DEVICES"
  elif n=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); then echo "$n"
  elif n=$(rocm-smi --showid --csv 2>/dev/null | grep -c '^card'); then echo "$n"
  else echo 0; fi
}

# The first host of a Slurm list; empty in a container, which has no scontrol.
first_host() { scontrol show hostnames "$1" 2>/dev/null | sed 1q || :; }

# The address of this node on its way to node 0; empty where that cannot be looked up.
own_address() {
  python3 -c 'import socket, sys
s = socket.socket(type=socket.SOCK_DGRAM)
s.connect((sys.argv[1], 1))
print(s.getsockname()[0])' "$MASTER_ADDR" 2>/dev/null || :
}

# RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE: the launcher has started a task per GPU. They are the ranks; no torchrun.
tasks_are_ranks() {
  number RANK "$1" 0; number WORLD_SIZE "$2" 16; number LOCAL_RANK "$3" 0; number LOCAL_WORLD_SIZE "$4" 8
  if [ "$4" -eq 0 ] || [ "$(($2 % $4))" -ne 0 ]; then
    die "WORLD_SIZE=$2 is not a multiple of LOCAL_WORLD_SIZE=$4, the tasks per node"
  fi
  [ "$devices" -eq 0 ] || [ "$3" -lt "$devices" ] ||
    die "LOCAL_RANK=$3, but this task sees $devices of its node's GPUs; let every task see all of them"
  export RANK="$1" WORLD_SIZE="$2" LOCAL_RANK="$3" LOCAL_WORLD_SIZE="$4"
  direct=1 NNODES=$(($2 / $4)) NODE_RANK=0 NPROC_PER_NODE=$4
}

slurm() {
  : "${MASTER_PORT:=$((20000 + SLURM_JOB_ID % 20000))}" # jobs that share a node do not meet
  case ${SLURM_STEP_ID:-none} in
    none | 4294967290) # in a batch script, or in a shell of salloc, which may be a step of this number
      if [ -z "${NODE_RANK:-}" ] && [ "${NNODES:-}" != 1 ]; then fan_out=${SLURM_JOB_NUM_NODES:-1}; fi
      : "${NNODES:=${SLURM_JOB_NUM_NODES:-1}}" "${MASTER_ADDR:=$(first_host "${SLURM_JOB_NODELIST:-}")}" ;;
    *)
      nodes=${SLURM_STEP_NUM_NODES:-1} tasks=${SLURM_STEP_NUM_TASKS:-${SLURM_STEP_NUM_NODES:-1}}
      number SLURM_STEP_NUM_NODES "$nodes" 2; number SLURM_STEP_NUM_TASKS "$tasks" 16
      if [ -n "${SLURM_PTY_PORT:-}" ]; then tasks=$nodes; fi # the shell of srun --pty is the only one of its tasks
      : "${MASTER_ADDR:=$(first_host "${SLURM_STEP_NODELIST:-}")}"
      if [ "$tasks" -gt "$nodes" ]; then
        tasks_are_ranks "${SLURM_PROCID:-}" "$tasks" "${SLURM_LOCALID:-}" "$((tasks / nodes))"
      else : "${NNODES:=$nodes}" "${NODE_RANK:=${SLURM_NODEID:-0}}"; fi ;;
  esac
}

openmpi() {
  if [ "$OMPI_COMM_WORLD_LOCAL_SIZE" -gt 1 ]; then
    tasks_are_ranks "$OMPI_COMM_WORLD_RANK" "$OMPI_COMM_WORLD_SIZE" \
      "$OMPI_COMM_WORLD_LOCAL_RANK" "$OMPI_COMM_WORLD_LOCAL_SIZE"
  else : "${NNODES:=$OMPI_COMM_WORLD_SIZE}" "${NODE_RANK:=$OMPI_COMM_WORLD_RANK}"; fi
}

# Threads of each rank's operators and processes that compile for it, 32 each on 8 ranks otherwise: its share of the cores.
# On CPUs one thread, since those of several ranks would compete. nproc of a rank that is a task may be that of the task.
# Gathered weights of many sizes would fragment the memory of a GPU. What is set stays.
share_node() {
  cores=1
  if [ "$devices" -gt 0 ]; then
    all=$(nproc --all 2>/dev/null) mine=$(nproc 2>/dev/null) || all=1 mine=1
    cores=$((mine / NPROC_PER_NODE))
    if [ -n "$direct" ]; then cores=$((all / NPROC_PER_NODE < mine ? all / NPROC_PER_NODE : mine)); fi
    [ "$cores" -ge 1 ] || cores=1
    export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-$((cores < 32 ? cores : 32))}"
    [ -n "${PYTORCH_CUDA_ALLOC_CONF+set}${PYTORCH_HIP_ALLOC_CONF+set}" ] ||
      export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF-expandable_segments:True}"
  fi
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$cores}"
}

# Nodes that wait for the place of a lost one are among those of a scheduler.
spares() {
  number SPARES "${SPARES:=0}" 1
  if [ -n "${STORE_ADDR:=}" ]; then
    case ${STORE_ADDR%:*}/${STORE_ADDR##*:} in
      /* | */ | */*[!0-9]* | "$STORE_ADDR/$STORE_ADDR")
        die "STORE_ADDR=$STORE_ADDR: expected host:port, such as STORE_ADDR=head:29500" ;;
    esac
    [ -n "${IN_PLACE:-}" ] || die "STORE_ADDR=$STORE_ADDR needs IN_PLACE=1"
    : "${MASTER_ADDR:=${STORE_ADDR%:*}}"
  fi
  if [ "$SPARES" -gt 0 ]; then
    [ -n "${IN_PLACE:-}" ] || die "SPARES=$SPARES needs IN_PLACE=1: spare nodes take the place of lost ones"
    [ -n "$given" ] || { number NNODES "$NNODES" 3 && NNODES=$((NNODES - SPARES)); }
  fi
}

# THE ONE PLACE FOR LAUNCHERS. The first one that is present counts; SkyPilot and mpirun, which may run on Slurm, come
# before it. Besides the plain variables it sets
#   devices  the GPUs of this node
#   direct   1 where this process is a rank already
#   fan_out  the nodes on which srun has yet to start train.sh
cluster() {
  devices=$(gpus) direct='' fan_out='' per_node='' given=${NNODES:-}
  if [ -n "${RANK:-}" ] && [ -n "${LOCAL_RANK:-}" ] && [ -z "${NNODES:-}" ]; then # a task per GPU, by torch's names
    if [ "${WORLD_SIZE:-}" = 1 ]; then : "${LOCAL_WORLD_SIZE:=1}"; fi # left by a notebook or accelerate
    tasks_are_ranks "$RANK" "${WORLD_SIZE:-}" "$LOCAL_RANK" "${LOCAL_WORLD_SIZE:-}"
  elif [ -n "${SKYPILOT_NODE_RANK:-}" ]; then
    : "${NNODES:=${SKYPILOT_NUM_NODES:-}}" "${NODE_RANK:=$SKYPILOT_NODE_RANK}"
    : "${MASTER_ADDR:=$(echo "${SKYPILOT_NODE_IPS:-}" | sed 1q)}"
    per_node=${SKYPILOT_NUM_GPUS_PER_NODE:-}
  elif [ -n "${DSTACK_NODE_RANK:-}" ]; then
    : "${NNODES:=${DSTACK_NODES_NUM:-}}" "${NODE_RANK:=$DSTACK_NODE_RANK}" "${MASTER_ADDR:=${DSTACK_MASTER_NODE_IP:-}}"
    per_node=${DSTACK_GPUS_PER_NODE:-}
  elif [ -n "${PET_NNODES:-}" ]; then # Kubeflow
    : "${NNODES:=$PET_NNODES}" "${NODE_RANK:=${PET_NODE_RANK:-}}"
    : "${MASTER_ADDR:=${PET_MASTER_ADDR:-}}" "${MASTER_PORT:=${PET_MASTER_PORT:-}}"
    per_node=${PET_NPROC_PER_NODE:-}
  elif [ -n "${OMPI_COMM_WORLD_SIZE:-}" ]; then openmpi
  elif [ -n "${SLURM_JOB_ID:-}" ]; then slurm
  elif [ -n "${RANK:-}" ] && [ -n "${WORLD_SIZE:-}" ] && [ -n "${MASTER_ADDR:-}" ] && [ -z "${LOCAL_RANK:-}" ]; then
    : "${NNODES:=$WORLD_SIZE}" "${NODE_RANK:=$RANK}" # Kubeflow's PyTorchJob, in which these count pods
  elif [ -n "${JOB_COMPLETION_INDEX:-}" ] && [ "${NNODES:-1}" != 1 ]; then # an Indexed Job of Kubernetes
    : "${NODE_RANK:=$JOB_COMPLETION_INDEX}"
  fi
  case $per_node in '' | 0 | *[!0-9]*) per_node=$((devices > 0 ? devices : 1)) ;; esac # it may say "auto"
  : "${NNODES:=1}" "${NODE_RANK:=0}" "${MASTER_PORT:=29500}" "${NPROC_PER_NODE:=$per_node}"
  spares
}
