"""The number of files that one has to open to follow a training step: those whose functions run in it, on one rank.

    python benchmarks/step_files.py          # FlowGRPO of images, and GRPO of texts
    python benchmarks/step_files.py --list   # with the names of the files and of their functions

The second step of a run is traced, on the main thread: samples, rewards, advantages, replay, backward, optimizer step,
metrics, and the end of the step, without validation, checkpoint and further loggers. The first step would add functions
that run only once, such as the text encoders. Functions of rewards/ are counted once more with those that run on the
threads of the rewards; the reward is a plain function, whose calls are not split.
"""

import argparse
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from alone import trainer_of

import phalanx

PACKAGE = Path(phalanx.__file__).parent
PLAIN = "model.cpu_linear=torch"  # oneDNN, the default on some processors, has a separate file
OUTSIDE = {"fit"}  # functions that are not part of the step
FLOW = [
    "data.train_batch_size=2",
    "rollout.n=4",
    "actor.ppo_mini_batch_size=2",
    "actor.ppo_micro_batch_size_per_gpu=4",
    "actor.ema.decay=null",
    "reward.functions=[{name: jpeg_incompressibility, per_sample: false}]",
]
TEXT = ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=8"]
TEXT += ["data.max_response_length=16"]


def traced(kind: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """The functions that run in a step of a job, `flow` or `text`, by file below src/phalanx: on the main thread, and
    those of rewards/ on all threads.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # a thread of the job may still write
        folder = Path(name)
        if kind == "flow":
            from phalanx.config.flow import FlowRLConfig

            trainer = trainer_of(FlowRLConfig, "configs/flowgrpo/quickstart.yaml", 2, folder, [*FLOW, PLAIN])
        else:
            from phalanx.config.lm import LMRLConfig

            reward = folder / "reward.py"
            reward.write_text("def length(completions, prompts, metadata):\n    return [len(c) for c in completions]\n")
            keys = [*TEXT, PLAIN, f"reward.functions=[{{path: '{reward}:length'}}]"]
            trainer = trainer_of(LMRLConfig, "configs/grpo/quickstart.yaml", 2, folder, keys)
        return trace_second_step(trainer)


def trace_second_step(trainer: Any) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Run the job, and record the functions that are called from the end of the first step to that of the second."""
    seen: dict[str, set[str]] = defaultdict(set)
    beside: dict[str, set[str]] = defaultdict(set)
    in_step = threading.Event()

    def enter(frame: Any, into: dict[str, set[str]] = seen) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            into[str(path.relative_to(PACKAGE))].add(frame.f_code.co_name)

    def called(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            enter(frame)

    def called_beside(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and (in_step.is_set() or frame.f_code.co_name == "_run_tasks"):  # a loop that began before
            enter(frame, beside)

    end_step = trainer.job.end_step

    def watched(step: int, row: dict[str, float]) -> None:
        end_step(step, row)
        if step == 1:
            frame: Any = sys._getframe()
            while frame is not None:  # functions such as the loop are running already
                enter(frame)
                frame = frame.f_back
            in_step.set()
            sys.setprofile(called)
        else:
            sys.setprofile(None)
            in_step.clear()

    trainer.job.end_step = watched
    threading.setprofile(called_beside)  # of threads that start from here on, as those of the rewards
    trainer.fit()
    threading.setprofile(None)
    rewards: dict[str, set[str]] = {}
    for name in seen.keys() | beside.keys():
        functions = {each for each in seen[name] | beside[name] if not each.startswith("<")}
        if name.startswith("rewards/") and functions:
            rewards[name] = functions
    return {name: functions - OUTSIDE for name, functions in seen.items() if functions - OUTSIDE}, rewards


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the files and their functions")
    parser.add_argument("kind", nargs="?", choices=("flow", "text"), help="one kind only")
    args = parser.parse_args()
    for kind in [args.kind] if args.kind else ["flow", "text"]:
        files, rewards = traced(kind)
        loop = sum(name.startswith("training/") for name in files)
        functions = sum(len(names) for names in files.values())
        job = sum(name.startswith("run/") for name in files)
        print(
            f"{kind}: {len(files) - job} files of the core, {loop} of them in training/, and {job} of run/, "
            f"{functions} functions"
        )
        met = sum(len(names) for names in rewards.values())
        print(f"{kind}: a reward meets {met} functions in {len(rewards)} files of rewards/, on all threads")
        if args.list:
            for name in sorted(files):
                print(f"  {name}: {', '.join(sorted(files[name]))}")
            for name in sorted(rewards):
                print(f"  reward: {name}: {', '.join(sorted(rewards[name]))}")


if __name__ == "__main__":
    main()
