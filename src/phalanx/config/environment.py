"""Environments and tools with which a language model interacts over several turns of a sample."""

from dataclasses import dataclass
from typing import Any, Optional

from phalanx.config.fields import arg
from phalanx.config.ranges import COUNT, TIMES

PATHS = "a built-in environment, module:Class, path/to/file.py:Class, or a section that maps names to these"


@dataclass
class EnvironmentConfig:
    """The environment or the tools with which a language model interacts."""

    path: Any = arg(
        None,
        "environment: a built-in one, module:Class, path/to/file.py:Class, or an async function in place of the class; "
        "or a mapping from names to these, from which each row's column environment selects; null: none",
        valid=lambda path: None if isinstance(path, str | dict | None) else PATHS,
    )
    kwargs: dict[str, Any] = arg({}, "keyword arguments of its class; with several environments, keyed by their names")
    tools: list[str] = arg([], "stateless functions as tools: built-in ones, module:function or file.py:function")
    tool_config_path: Optional[str] = arg(
        None, "verl's tools: a YAML file that lists class_name, config and tool_schema of each", path=True
    )
    max_turns: int = arg(8, "maximum turns of the model per sample", **TIMES)
    max_calls_per_turn: int = arg(
        1, "tool calls of a turn that are run; the model reads that further ones were not", ge=1
    )
    max_observation_length: int = arg(512, "longest answer of an environment or a tool, in tokens", ge=1, le=2**20)
    truncate_side: str = arg(
        "middle",
        "part of a longer answer that is removed: its beginning (left), middle, or end (right)",
        choices=("middle", "left", "right"),
    )
    timeout_s: float = arg(
        30.0, "longest call of a tool, step, reset or get_reward, in seconds from when it begins to run", gt=0
    )
    num_workers: int = arg(32, "threads of a rank for them; all async functions share one event loop", ge=1, le=1024)
    join: int = arg(
        32,
        "answers join the batch every this many decoding steps; 0: on arrival, with which bfloat16 runs are not "
        "bitwise reproducible",
        ge=0,
        le=COUNT["le"],
    )
    on_error: str = arg(
        "observe",
        "if a tool raises: observe: the model reads the error; end: the sample ends without a reward; fail: the job "
        "ends",
        choices=("observe", "end", "fail"),
    )
    max_error_fraction: float = arg(
        0.5,
        "largest fraction of a rollout's samples, over all ranks, in which code of an environment may raise or time "
        "out; more end the job",
        gt=0,
        le=1,
    )
    format: str = arg("hermes", "format of the model's tool calls: a built-in one, or module:function of a parser")

    @property
    def used(self) -> bool:
        """Whether an environment or a tool is configured."""
        return bool(self.path or self.tools or self.tool_config_path)
