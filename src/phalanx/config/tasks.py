"""Configuration of tasks other than training: export_checkpoint.py, sample.py, generate.py and others."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Optional, TypeVar

import yaml
from omegaconf import OmegaConf

from phalanx.config.choices import CHECKPOINT, FOLDER
from phalanx.config.fields import arg
from phalanx.config.files import MOST_CONFIG, read_bytes
from phalanx.config.flow import FlowDataConfig, FlowMatchingTaskConfig, FlowRewardConfig, FlowRLConfig
from phalanx.config.joint import PAINTER, POLICIES
from phalanx.config.lm import MOST_TOKENS, LMDataConfig
from phalanx.config.load import build
from phalanx.config.messages import ConfigError, UnknownKeys
from phalanx.config.parallel import ParallelConfig
from phalanx.config.ranges import COUNT, DTYPES, SDE_TYPES, SEEDS, TEXTS, TIMES, WARM
from phalanx.config.run import RunConfig, TrainerConfig
from phalanx.config.section import Section
from phalanx.config.sources import parse_yaml
from phalanx.config.trained_model import ATTENTION, FlowModelConfig
from phalanx.config.trust import Use

T = TypeVar("T", bound=RunConfig)

WEIGHTS = ("auto", "model", "ema")
TRUST = (
    "run code that the checkpoint's own config.yaml names (rewards, environments, engines, a model's family), and read "
    "the environment variables to which it refers"
)
OF_RUN = (
    "a run's output_dir, for its newest complete checkpoint, output_dir/best, for its best by trainer.keep_best, or a "
    "folder step_NNNNNN"
)
EXPORT_DTYPES = (*DTYPES, "float16")
KINDS = ("lm", "flow")
INSTRUCTIONS = ("hash", "boxed", "line", "answer", "none")


@dataclass
class ExportConfig:
    """Configuration of tasks/export_checkpoint.py."""

    checkpoint: str = arg("???", OF_RUN)
    policy: Optional[str] = arg(None, "for a joint run: policy to export", choices=POLICIES)
    output_dir: Optional[str] = arg(
        None,
        "new folder for the export; null: export/step_NNNNNN in the run's output_dir, or export/<policy>/step_NNNNNN "
        "for a joint run",
    )
    weights: str = arg("auto", "auto: the moving average if the checkpoint has one", choices=WEIGHTS)
    trust_run: bool = arg(False, TRUST)
    dtype: Optional[str] = arg(
        None,
        "dtype of the export; null: a LoRA in the dtype in which it was trained, a whole transformer in that of the "
        "base model folder, a whole language model or a model with a merged LoRA in the run's model.dtype",
        choices=EXPORT_DTYPES,
    )
    merge_lora: bool = arg(False, "for a LoRA: write a whole model folder with merged weights instead of the LoRA file")
    model_path: Optional[str] = arg(None, "base model, if it is no longer at the run's model.path", path=True)
    push_to_hub: Optional[str] = arg(None, "hub repository (user/name) for the export; it is created if needed")


@dataclass
class SampleModelConfig:
    """The model to sample from. LoRA settings are always those of the checkpoint's run."""

    path: Optional[str] = arg(None, "diffusers model folder or hub id; null: the checkpoint's base model", path=True)
    revision: Optional[str] = arg(None, "commit, tag or branch of a hub id; null: the run's for its own model, or main")
    family: Optional[str] = arg(
        None, "model family: module of phalanx.zoo.families, or a dotted module; null: from model_index.json"
    )
    dtype: Optional[str] = arg(None, "dtype of the computation; null: the run's, or bfloat16", choices=DTYPES)
    reference_count: Optional[int] = arg(None, "number of images in each row's `image`; null: the run's, or 1", **COUNT)
    reference_size: Optional[int] = arg(
        None, "side in pixels of the square whose area an image to edit is scaled to; null: the run's, or 1024", ge=32
    )
    attn_backend: Optional[str] = arg(None, "attention backend of diffusers' dispatcher; null: the run's, or torch's")
    compile: Optional[bool] = arg(None, "torch.compile each transformer block; null: the run's, or false")


@dataclass
class SampleConfig(Section):
    """Configuration of tasks/sample.py. Sampling settings that are null are taken from the run's validation."""

    model: SampleModelConfig = field(default_factory=SampleModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: Optional[str] = arg(None, f"{OF_RUN}; null: the model folder")
    weights: str = arg("auto", "auto: the moving average if the checkpoint has one", choices=WEIGHTS)
    trust_run: bool = arg(False, TRUST)
    prompts: list[str] = arg([], "a prompt, or a list such as '[a red apple, two cats]'", single="(?s).*")
    prompt_file: Optional[str] = arg(
        None, "file of prompts: .txt, .jsonl, .json, .csv, .parquet, or a Hugging Face dataset folder", path=True
    )
    prompt_key: str = arg("prompt", "column of the prompts in prompt_file")
    max_prompt_length: Optional[int] = arg(
        None, "maximum tokens that the T5 or Qwen text encoder sees; null: the run's, or 256", **COUNT
    )
    n: int = arg(1, "images per prompt", **COUNT)
    num_inference_steps: Optional[int] = arg(None, "denoising steps; null: the run's, or 10", **TIMES)
    height: Optional[int] = arg(None, "height in pixels; null: the run's, or 512", **COUNT)
    width: Optional[int] = arg(None, "width in pixels; null: the run's, or 512", **COUNT)
    num_frames: Optional[int] = arg(None, "frames of a video; null: the run's, or 1, which is an image", **COUNT)
    guidance_scale: Optional[float] = arg(
        None,
        "scale of classifier-free guidance (SD3, Z-Image, FLUX.2 Klein base, videos) or FLUX's input; null: the run's, "
        "or 1",
    )
    guidance_scale_2: Optional[float] = arg(
        None, "guidance scale in the steps of Wan 2.2 A14B's transformer_2; null: the run's, or guidance_scale"
    )
    true_cfg_scale: Optional[float] = arg(
        None, "scale of true classifier-free guidance (Qwen-Image, FLUX.1); null: the run's, or 1, which is off"
    )
    noise_level: Optional[float] = arg(None, "eta of the sampler; 0: the ODE; null: the run's, or 0", ge=0)
    sde_type: Optional[str] = arg(
        None, "form of the stochastic step if noise_level > 0; null: the run's, or sde", choices=SDE_TYPES
    )
    seed: Optional[int] = arg(None, "seed of the noise; null: that of the run's validation, or 1234", **SEEDS)
    micro_batch_size_per_gpu: int = arg(1, "images sampled together", **COUNT)
    output_dir: str = arg("outputs/samples", "folder for the images and grid.png, which are overwritten")
    columns: Optional[int] = arg(None, "images per row of the grid; null: n, or a square grid if n is 1", **COUNT)


@dataclass
class GenerateModelConfig:
    """The model to generate with. LoRA settings are always those of the checkpoint's run."""

    path: Optional[str] = arg(None, "language model's folder or hub id; null: the checkpoint's base model", path=True)
    revision: Optional[str] = arg(None, "commit, tag or branch of a hub id; null: the run's for its own model, or main")
    dtype: Optional[str] = arg(None, "dtype of the computation; null: the run's, or bfloat16", choices=DTYPES)
    attn_implementation: Optional[str] = arg(
        None, "attention implementation of transformers; null: the run's, or sdpa", choices=ATTENTION
    )
    block_size: Optional[int] = arg(
        None, "block diffusion: tokens of a block; null: the run's, or an autoregressive model", **TIMES
    )
    mask_token: Optional[str] = arg(None, "block diffusion: the mask token; null: the run's, or the tokenizer's")


@dataclass
class GenerateConfig:
    """Configuration of tasks/generate.py. Settings that are null are taken from the run's validation."""

    model: GenerateModelConfig = field(default_factory=GenerateModelConfig)
    checkpoint: Optional[str] = arg(None, f"{OF_RUN}; null: the model folder")
    weights: str = arg("auto", "auto: the moving average if the checkpoint has one", choices=WEIGHTS)
    trust_run: bool = arg(False, TRUST)
    prompts: list[str] = arg(
        [], """a prompt, such as 'Why is the sky blue?', or a list, '["Why?", "How, and when?"]'""", single="(?s).*"
    )
    prompt_file: Optional[str] = arg(
        None, "file of prompts: .txt, .jsonl, .json, .csv, .parquet, or a Hugging Face dataset folder", path=True
    )
    prompt_key: Optional[str] = arg(None, "column of the prompts in prompt_file; null: the run's, or prompt")
    system_prompt: Optional[str] = arg(None, "system message for prompts without one; null: the run's, or none")
    chat_template_kwargs: dict[str, Any] = arg(
        {}, "variables for the chat template, in addition to the run's data.chat_template_kwargs"
    )
    n: Optional[int] = arg(None, "responses per prompt; null: the run's, or 1", **COUNT)
    temperature: Optional[float] = arg(None, "sampling temperature; 0: greedy; null: the run's, or 0", valid=WARM, ge=0)
    top_p: Optional[float] = arg(
        None, "sample from the most likely tokens up to this total probability; null: the run's, or 1", gt=0, le=1
    )
    top_k: Optional[int] = arg(
        None, "sample from this number of most likely tokens; -1 or 0: from all; null: the run's, or all", ge=-1
    )
    min_p: Optional[float] = arg(
        None,
        "sample from tokens with at least this fraction of the largest probability; null: the run's, or 0",
        ge=0,
        le=1,
    )
    stop: Optional[list[str]] = arg(None, "texts that end a response; null: the run's, or none", valid=TEXTS)
    max_response_length: Optional[int] = arg(
        None, "longest response, in tokens; null: the run's, or 1024 if the model's context allows it", **MOST_TOKENS
    )
    denoising_steps_per_block: Optional[int] = arg(
        None,
        "block diffusion: maximum number of denoising steps per block, each of which unmasks at least an equal share "
        "of it; null: the run's, or one per token",
        **TIMES,
    )
    threshold: Optional[float] = arg(
        None,
        "block diffusion: tokens above this probability are unmasked at once; 1: none; null: the run's, or 0.9",
        gt=0,
        le=1,
    )
    seed: Optional[int] = arg(None, "seed of the sampling; null: that of the run's validation, or 1234", **SEEDS)
    micro_batch_size_per_gpu: int = arg(8, "responses decoded together", **COUNT)
    environment: bool = arg(True, "use the environment of the checkpoint's run, over several turns; false: one turn")
    output_file: Optional[str] = arg(None, "JSON lines of prompts and responses, overwritten; null: only print them")


@dataclass
class EvaluateConfig:
    """Configuration of tasks/evaluate.py. The sections model, data, rollout, reward and environment contain keys of a
    training job, such as rollout.val.temperature=0.6, which override those of the checkpoint's run.
    """

    model: dict[str, Any] = arg({}, "model.path, model.lora_path and others, as in training; for a folder, its path")
    data: dict[str, Any] = arg({}, "data.val_files, data.max_response_length and others, as in training")
    rollout: dict[str, Any] = arg({}, "rollout.engine, rollout.val.temperature and others, as in training")
    reward: dict[str, Any] = arg({}, "reward.functions, reward.model.path and others, as in training")
    environment: dict[str, Any] = arg({}, "environment.path, environment.tools and others, as in training")
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: Optional[str] = arg(None, f"{OF_RUN}; null: the model folder")
    policy: Optional[str] = arg(None, "for a joint run: policy to evaluate", choices=POLICIES, only=(CHECKPOINT,))
    weights: str = arg("auto", "auto: the moving average if the checkpoint has one", choices=WEIGHTS)
    trust_run: bool = arg(False, TRUST)
    kind: Optional[str] = arg(
        None,
        "kind of model, if there is no checkpoint: lm or flow; null: from its local folder",
        choices=KINDS,
        only=(FOLDER,),
    )
    baseline: Optional[str] = arg(
        None, "baseline for differences: the output_dir of an earlier evaluation, a checkpoint, or a model folder"
    )
    n: Optional[int] = arg(None, "samples per prompt; null: as in the run's validation, or 1", **COUNT)
    seed: Optional[int] = arg(None, "seed of the samples; null: that of the run's validation, or 1234", **SEEDS)
    k: Optional[list[int]] = arg(
        None, "values of k in avg@k, pass@k, best@k and majority@k; null: the powers of 2 up to n", each={"ge": 1}
    )
    threshold: Optional[float] = arg(
        None, "lowest score with which a sample passes; null: 1 if all scores are 0 or 1, otherwise no pass@k"
    )
    group_by: Optional[str] = arg(None, "column of the data; statistics are also reported for each of its values")
    prompts_per_chunk: int = arg(
        64, "prompts that all ranks sample together; their records are written as soon as they are scored", **COUNT
    )
    output_dir: Optional[str] = arg(
        None,
        "folder for records.jsonl, evaluation.json and evaluation.html; an evaluation with the same arguments is "
        "resumed from its records; null: evaluation/step_NNNNNN in the run's output_dir, or outputs/evaluation/<its "
        "name> for a folder",
    )


@dataclass
class CheckedModelConfig(FlowModelConfig):
    """The model of a training job, which is optional here."""

    path: str = arg("", "diffusers model folder or hub id that every node must read; empty: not checked", path=True)


@dataclass
class CheckClusterConfig(FlowRLConfig, FlowMatchingTaskConfig):
    """Configuration of tasks/check_cluster.py: all keys of the flow models' training tasks, and a few more."""

    kind: ClassVar[str] = "flow"
    model: CheckedModelConfig = field(default_factory=CheckedModelConfig)
    expect: Optional[int] = arg(None, "expected number of ranks; null: any number", ge=1)
    timeout_s: float = arg(60.0, "longest step of the check, in seconds", gt=0)
    min_free_gb: float = arg(50.0, "warn if trainer.output_dir has less free space than this, in GB (10^9 bytes)", ge=0)


@dataclass
class CheckNumericsConfig:
    """Configuration of tasks/check_numerics.py. Each job samples a step, and is not trained."""

    config: Optional[str] = arg(
        None,
        "configuration file of tasks/train_flowgrpo.py, tasks/train_grpo.py or, with `part`, tasks/train_joint.py; "
        "null: a few samples of shipped prompts, with `keys` such as model.path",
        path=True,
    )
    part: Optional[str] = arg(
        None,
        "the policy of a joint run that is checked; the painter paints the prompts of the data, not rewritten ones; "
        "null: the configuration is of one policy",
        choices=("writer", "painter"),
    )
    task: Optional[str] = arg(
        None,
        "the task of a supervised job: of its first update, loss and gradient are compared; null: of one that samples",
        choices=("sft", "dpo", "flow_matching", "block_diffusion"),
    )
    keys: list[str] = arg([], "overrides of that configuration, such as [model.path=my_model, rollout.n=4]")
    variants: dict[str, list[str]] = arg(
        {}, "jobs beside it, by name, with further overrides, such as {bf16: [model.dtype=bfloat16]}"
    )
    standard: bool = arg(
        False, "also jobs with another dtype, packing, attention, size of passes and sharding, and what else applies"
    )
    output_dir: str = arg("outputs/numerics", "folder for numerics.json and numerics.html, and of the jobs")


@dataclass
class ServeRewardConfig:
    """Configuration of tasks/serve_reward.py. reward.timeout_s covers both the wait and the scoring of a request."""

    reward: FlowRewardConfig = field(
        default_factory=FlowRewardConfig, metadata={"unused": ("on_error", "max_error_fraction")}
    )
    host: str = arg("127.0.0.1", "address to listen on; an address that other machines can reach requires a token")
    port: int = arg(8077, "port to listen on; 0: any free one", ge=0, lt=65536)
    token_env: Optional[str] = arg(None, "environment variable with the token that clients must send; null: no token")
    allow_open: bool = arg(False, "serve every client that reaches the server, without a token")
    max_body_mb: float = arg(64.0, "largest request, in MB (10^6 bytes)", gt=0)
    max_images: int = arg(64, "maximum number of images per request", ge=1)
    max_pixels: int = arg(2**22, "largest image, in pixels", ge=1)
    max_memory_mb: float = arg(4000.0, "memory for the pixels of all requests, in MB; further requests wait", gt=0)
    max_requests: int = arg(256, "maximum number of concurrent connections; further clients are told to retry", ge=1)
    read_timeout_s: float = arg(30.0, "seconds within which the head of a request must arrive, and then its body", gt=0)


@dataclass
class PrepareDataConfig:
    """Configuration of tasks/prepare_data.py."""

    source: Optional[str] = arg(
        None, "file of problems with answers, such as GSM8K's .jsonl, MATH's, or a .parquet of verl", path=True
    )
    reasoning_gym: list[str] = arg([], "in place of source: tasks of reasoning-gym, such as [chain_sum&min_terms=2]")
    size: int = arg(1000, "rows generated for each of these tasks", ge=1)
    prompt_key: Optional[str] = arg(None, "column of the prompts; null: prompt, question, problem or messages")
    answer_key: Optional[str] = arg(
        None, "column of the answers; null: ground_truth, reward_model.ground_truth, answer or solution"
    )
    test_source: Optional[str] = arg(
        None,
        "file of held-out problems, which becomes test.jsonl; its prompts are excluded from the other files",
        path=True,
    )
    instruction: Optional[str] = arg(
        None,
        "instruction appended to each prompt: to give the answer after #### (hash), in \\boxed{} (boxed), in a line "
        "Answer: (line), in tags (answer), or none; null: the form of the source's own solutions, tags for "
        "reasoning-gym",
        choices=INSTRUCTIONS,
    )
    suffix: Optional[str] = arg(None, "custom text to append in place of an instruction")
    val_size: int = arg(200, "prompts held out as val.jsonl; 0: none", ge=0)
    seed: int = arg(0, "seed of the split and of reasoning-gym's tasks", **SEEDS)
    output_dir: str = arg("outputs/data", "folder for train.jsonl, val.jsonl and test.jsonl, which are overwritten")


def read_run(file: Path, *kinds: type[T], policy: str | None = None, use: Use | None = None) -> T:
    """Read the sections that all jobs of a kind share from the config.yaml of a run's output_dir.

    kinds: schemas such as FlowRunConfig; the first one that has all keys of the file's sections is used. Other sections
    (algorithm, actor, ...) are left out, so that custom modules that they name are not needed.
    policy: for a joint run, the policy whose sections are read.
    use: what the task takes from it; by default nothing that needs trust.
    Raises ConfigError if the file is missing, is not such a configuration, or needs trust.
    """
    try:
        content = parse_yaml(read_bytes(file, MOST_CONFIG).decode())
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing; it says which model the checkpoints belong to") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{file} is not the configuration of a training run: {error.problem}") from None
    except ValueError:
        content = None
    if isinstance(content, dict) and content.keys() >= {*POLICIES, "data", "trainer"}:
        if policy is None:
            raise ConfigError(f"policy is not set; {file} is of a joint run: expected policy={' or '.join(POLICIES)}")
        content = _of_policy(content, policy)
    if isinstance(content, dict):
        content = (use or Use()).checked(content, file)
    reason = None
    for kind in kinds:
        names = [f.name for f in fields(kind)]
        # a policy of a joint run and files of older versions have no sweep
        if isinstance(content, dict) and content.keys() >= {*names} - {"sweep"}:
            try:
                return build(kind, OmegaConf.create({name: content[name] for name in names if name in content}))
            except ConfigError as error:  # prefer other errors to an unknown key, which another kind may have
                if reason is None or not isinstance(error, UnknownKeys):
                    reason = f"{file}: {error}"
    raise ConfigError(reason or f"{file} is not the configuration of a training run")


def _of_policy(content: dict[str, Any], policy: str) -> dict[str, Any]:
    """The sections of a joint run's policy as those of a separate run. Only the painter gets the reward of images."""
    data, trainer = content["data"], content["trainer"]
    kind = FlowDataConfig if policy == PAINTER else LMDataConfig
    known = {name: data[name] for name in data if name in {f.name for f in fields(kind)}}
    if policy == PAINTER:
        known["max_prompt_length"] = data["max_rewrite_length"]
    sections = {
        "parallel": content["parallel"],
        "data": known,
        "reward": content["reward"] if policy == PAINTER else {},
        "trainer": {f.name: trainer[f.name] for f in fields(TrainerConfig) if f.name in trainer},
    }
    return content[policy] | sections
