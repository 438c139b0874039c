#!/bin/sh
# Train on nodes with AMD GPUs, in Docker. On each node, from the repository's root, NODE_RANK being 0 to 3:
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 sh examples/launch/rocm_docker.sh
# On a single node, omit these variables.
set -eu

# EDIT 1: an image with torch for ROCm, and Phalanx
image=phalanx-rocm:latest
# EDIT 2: the folder of models, prompts and outputs, which all nodes share
folder=/shared

# For a subset of the GPUs, add --env HIP_VISIBLE_DEVICES; ROCR_VISIBLE_DEVICES would renumber them first.
exec docker run --rm --init --device=/dev/kfd --device=/dev/dri --group-add=video --security-opt=seccomp=unconfined \
  --network=host --ipc=host --ulimit=memlock=-1 --stop-timeout=290 --env=GRACE_S=280 \
  --env=NNODES --env=NODE_RANK --env=MASTER_ADDR --env=NCCL_SOCKET_IFNAME --env=GLOO_SOCKET_IFNAME \
  --volume="$PWD:$PWD" --volume="$folder:$folder" --env=HOME="$folder" --workdir="$PWD" "$image" \
  sh train.sh tasks/train_flowgrpo.py configs/flowgrpo/qwen_image_ocr_lora_multinode.yaml \
  trainer.output_dir="$folder/outputs/phalanx"
