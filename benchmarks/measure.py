"""Shared by the benchmarks: the command line, a job that is timed while it trains, and the origin of figures."""

import argparse
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import lm_shapes
import torch
from shapes import SHAPES

from phalanx.config import ConfigError
from phalanx.config.flow import FlowRewardFunctionConfig, FlowRLConfig
from phalanx.config.lm import LMRLConfig
from phalanx.distributed.collectives import reduce_float
from phalanx.distributed.launch_env import Launch
from phalanx.run import rl
from phalanx.run.cli import fail, rank
from phalanx.run.rl import Trainer
from phalanx.run.rules import load_config
from phalanx.telemetry.step_metrics import peak_memory_gb
from phalanx.telemetry.timers import Timers
from phalanx.training.collect import Collector

HERE = Path(__file__).resolve().parent
C = TypeVar("C", FlowRLConfig, LMRLConfig)
PROMPTS_EACH = 8  # steps for which there are synthetic prompts


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser of `CONFIG.yaml [key=value ...]` and the options common to all benchmarks."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="configuration of tasks/train_flowgrpo.py, or where it fits train_grpo.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--shapes", help="random weights, synthetic prompts, random rewards: a shape of shapes.py or lm_shapes.py"
    )
    parser.add_argument("--steps", type=int, default=3, help="measured steps (3)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (1)")
    return parser


def configure(args: argparse.Namespace) -> FlowRLConfig:
    """Load a flow model's configuration, without validation, checkpoints and loggers; a mistake ends the process with
    one line.

    With `--shapes`, or if data.train_files is empty, prompts are synthetic.
    """
    family = "random_qwen_image" if "qwen" in (args.shapes or "") else "random_sd3"
    synthetic = [f"model.family={HERE / 'shapes.py'}:{family}", f"model.path={args.shapes}"] if args.shapes else []
    folder = Path(tempfile.mkdtemp(prefix="phalanx-bench-"))
    cfg = _loaded(FlowRLConfig, args, synthetic, folder)
    if args.shapes and not any(o.startswith("reward.functions=") for o in args.overrides):
        seconds = SHAPES[args.shapes].reward_s if args.shapes in SHAPES else 0.0  # building the model reports an error
        path = f"{HERE / 'shapes.py'}:random_reward"
        cfg.reward.functions = [FlowRewardFunctionConfig(path=path, kwargs={"seconds": seconds})]
    if args.shapes or not cfg.data.train_files:
        file = folder / "prompts.txt"
        numbers = range(cfg.data.batch_size(Launch.from_env().world_size) * PROMPTS_EACH)
        file.write_text("".join(f'a sign that says "number {i}"\n' for i in numbers))
        cfg.data.train_files = [str(file)]
    return cfg


def configure_lm(args: argparse.Namespace) -> LMRLConfig:
    """As `configure`, for a language model. With `--shapes`, prompts are the quickstart's word problems, and its own
    modules decode.
    """
    folder, synthetic = Path(tempfile.mkdtemp(prefix="phalanx-bench-")), list[str]()
    if args.shapes:
        try:
            synthetic.append(f"model.path={lm_shapes.folder_of(args.shapes, folder / 'model')}")
        except ValueError as error:
            fail(f"--shapes: {error}", status=2)
        synthetic += ["rollout.engine=policy", "data.prompt_key=question", "data.system_prompt=null"]
        synthetic += [f"data.train_files=[{lm_shapes.WORDS / 'train.jsonl'}]"]
        synthetic += [f"reward.functions=[{{path: '{HERE / 'lm_shapes.py'}:random_reward'}}]"]
    return _loaded(LMRLConfig, args, synthetic, folder)


def configure_any(args: argparse.Namespace) -> FlowRLConfig | LMRLConfig:
    """As `configure`, for the configuration of either kind of job."""
    if args.shapes:
        return configure_lm(args) if lm_shapes.is_shape(args.shapes) else configure(args)
    try:
        load_config(LMRLConfig, args.config, [])
    except ConfigError:
        return configure(args)
    return configure_lm(args)


def _loaded(schema: type[C], args: argparse.Namespace, synthetic: list[str], folder: Path) -> C:
    """The configuration with `synthetic` overrides before the given ones, whose files go below `folder`."""
    keys = ["total_training_steps=1", "logger=[]", "save_freq=-1", "test_freq=-1", "val_before_train=false"]
    keys += ["resume=never", f"output_dir={folder}"]
    try:
        cfg = load_config(schema, args.config, [*synthetic, *args.overrides, *(f"trainer.{key}" for key in keys)])
    except ConfigError as error:
        fail(str(error), status=2)
    cfg.data.val_files = []
    return cfg


class Meter(Timers):
    """Timers that wait for the device at both ends of a phase.

    They also measure the CPU seconds of this process (`cpu/<phase>`), which other work on the machine disturbs less,
    and the peak memory of each phase in GB (CUDA only).
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._open: list[float] = []
        self._cpu: dict[str, float] = {}
        self.memory_gb: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase; phases nest."""
        start = time.process_time()
        self._wait()
        with self._memory(name), super().__call__(name):
            yield
            self._wait()
        self._cpu[name] = self._cpu.get(name, 0.0) + time.process_time() - start

    def pop(self) -> dict[str, float]:
        """As phalanx.run.telemetry.run_logger.Timers.pop, with `cpu/<phase>`."""
        seconds, self._cpu = {f"cpu/{name}": value for name, value in self._cpu.items()}, {}
        return super().pop() | seconds

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def _memory(self, name: str) -> Iterator[None]:
        if self._device.type != "cuda":
            yield
            return
        self._note()
        self._open.append(0.0)
        try:
            yield
        finally:
            self._note()
            peak = self._open.pop()
            self.memory_gb[name] = max(peak, self.memory_gb.get(name, 0.0))
            if self._open:
                self._open[-1] = max(self._open[-1], peak)

    def _note(self) -> None:
        if self._open:
            self._open[-1] = max(self._open[-1], torch.cuda.max_memory_allocated(self._device) / 1e9)
        torch.cuda.reset_peak_memory_stats(self._device)


def use_timers(trainer: Trainer, timers: Timers) -> None:
    """Make all parts of a job use these timers."""
    collector = trainer.collector
    assert isinstance(collector, Collector), "samples are drawn here"
    for part in (
        trainer.job,
        trainer.job.sampling,
        collector,
        collector.rewards,
        trainer.updater,
        trainer.updater.rescorer,
    ):
        part.timers = timers  # type: ignore[union-attr]


class Bench:
    """A job whose rows of metrics are kept instead of written. `after(step)` runs, untimed, after each step.

    Nested phases: of flow models `decode` and `embed` within `rollout`; `optimizer` within `update`.
    """

    @classmethod
    def of(cls, cfg: FlowRLConfig | LMRLConfig, *, warmup: int, steps: int, trace: Path | None = None) -> "Bench":
        """`trace`: a file for a torch.profiler trace of one more step."""
        cfg.trainer.total_training_steps = warmup + steps + (trace is not None)
        trainer = rl.build(cfg)
        assert isinstance(trainer, Trainer), "each rank does everything"
        return cls(cfg, trainer, warmup=warmup, steps=steps, trace=trace)

    def __init__(
        self, cfg: FlowRLConfig | LMRLConfig, trainer: Trainer, *, warmup: int, steps: int, trace: Path | None
    ) -> None:
        self.cfg, self.trainer, self.plan = cfg, trainer, trainer.updater.plan
        self.policy: Any = trainer.policy
        self.world, self.collector = trainer.world, trainer.collector
        self.warmup, self.measured, self.trace = warmup, steps, trace
        self.measures: list[dict[str, float]] = []
        self.after: Callable[[int], None] = lambda step: None
        self.meter = Meter(self.world.device)
        self.profile: AbstractContextManager[Any] = nullcontext()
        # methods of these instances are replaced by timed ones, so that the code that users run stays unchanged
        use_timers(trainer, self.meter)
        if isinstance(cfg, FlowRLConfig):
            self.policy.decode = self._timed("decode", self.policy.decode)
            self.policy.embed = self._timed("embed", self.policy.embed)
        optimizer = trainer.job.state.optimizer
        optimizer.step = self._timed("optimizer", optimizer.step)  # type: ignore[method-assign]
        trainer.job.end_step = self._end_step  # type: ignore[method-assign]

    def fit(self) -> None:
        """Run the steps."""
        self.trainer.fit()

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.meter(name):
                return function(*args, **kwargs)

        return timed

    def _end_step(self, step: int, row: dict[str, float]) -> None:
        """Keep the row of metrics; with `trace`, start and stop the profiler around the last step."""
        job = self.trainer.job
        job.progress.step = step
        row["reward/busy_s"] = row["perf/reward_busy_s"]
        self.measures.append(row | self.meter.pop())
        if row["actor/updates_skipped"]:
            fail("all rewards of an update are equal, so it trains on nothing; set another reward", status=1)
        if self.trace is not None and step == job.total_steps - 1:
            from torch.profiler import ProfilerActivity, profile

            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.world.device.type == "cuda" else [])]
            self.profile = profile(activities=kinds, record_shapes=True)
            self.profile.__enter__()
        if self.trace is not None and step == job.total_steps:
            self.profile.__exit__(None, None, None)
        self.after(step)

    def medians(self) -> dict[str, float]:
        """The median of each metric over the measured steps."""
        rows = self.measures[self.warmup : self.warmup + self.measured]
        return {key: statistics.median(row[key] for row in rows) for key in rows[0]}

    def spread(self) -> tuple[float, float]:
        """Seconds of the fastest and the slowest measured step."""
        seconds = [row["perf/step_s"] for row in self.measures[self.warmup : self.warmup + self.measured]]
        return min(seconds), max(seconds)

    def peak_memory_gb(self) -> float:
        """The peak memory of any rank in GB (10^9 bytes): of the device, or resident memory on a CPU."""
        mine = max(self.meter.memory_gb.values(), default=peak_memory_gb(self.world.device))
        return reduce_float(mine, "max")


def origin(device: torch.device) -> dict[str, Any]:
    """The origin of a figure: machine, versions, commit."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False
        )
        commit = git.stdout.strip() or None
    except FileNotFoundError:  # a machine without git
        commit = None
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }


def cpu_name() -> str:
    """The processor's name, and the widest vector instructions that torch uses."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({torch.backends.cpu.get_cpu_capability()})"


def table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print two columns on rank 0."""
    if rank() != 0:
        return
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}", *(f"  {name:<{width}}  {value}" for name, value in rows), sep="\n", file=sys.stdout, flush=True)
