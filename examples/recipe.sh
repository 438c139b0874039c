#!/bin/sh
# From a base to a policy: SFT on 200 conversations with a calculator, GRPO, self-distillation, and a test of each.
#   NPROC_PER_NODE=2 sh examples/recipe.sh
# A second call goes on where the first one ended. docs/recipe.md says what happens.
set -eu

python3 assets/make/make_recipe.py output_dir=outputs/recipe
sh train.sh tasks/evaluate.py configs/recipe/test.yaml model.path=outputs/recipe/base kind=lm output_dir=outputs/recipe/test/base

stage() { # stage NAME TASK BASELINE
  sh train.sh "$2" "configs/recipe/$1.yaml"
  sh train.sh tasks/evaluate.py configs/recipe/test.yaml "checkpoint=outputs/recipe/$1" "baseline=outputs/recipe/test/$3" \
    "output_dir=outputs/recipe/test/$1"
  [ -d "outputs/recipe/$1_model" ] ||
    NPROC_PER_NODE=1 sh train.sh tasks/export_checkpoint.py "checkpoint=outputs/recipe/$1" "output_dir=outputs/recipe/$1_model"
}

stage sft tasks/train_sft.py base
stage grpo tasks/train_grpo.py sft
stage sdft tasks/train_grpo.py grpo
