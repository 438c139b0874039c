"""Environments and tools that a language model talks to, over several turns of a sample."""

from dataclasses import dataclass
from typing import Any, Optional

from phalanx.config.load import arg
from phalanx.config.ranges import COUNT, TIMES


@dataclass
class EnvironmentConfig:
    """The partner of a language model: tools, or an environment that reads its turns."""

    path: Any = arg(
        None,
        "environment: a built-in one, module:Class or path/to/file.py:Class, or an async function there;"
        " or a mapping of names to these, from which the data's column environment selects; null: none",
    )
    kwargs: dict[str, Any] = arg({}, "keyword arguments of its class; with several environments, keyed by their names")
    tools: list[str] = arg([], "functions without a state as tools: built-in ones, module:function or file.py:function")
    tool_config_path: Optional[str] = arg(
        None, "tools of verl: a YAML file with a list of class_name, config and tool_schema", path=True
    )
    max_turns: int = arg(8, "maximum turns of the model per sample", **TIMES)
    max_calls_per_turn: int = arg(
        1, "calls of tools in a turn that run; the model reads that further ones did not", ge=1
    )
    max_observation_length: int = arg(512, "longest answer of an environment or a tool, in tokens", ge=1, le=2**20)
    truncate_side: str = arg(
        "middle",
        "the part of longer ones that is removed: the beginning (left), the middle or the end (right)",
        choices=("middle", "left", "right"),
    )
    timeout_s: float = arg(
        30.0, "longest call of a tool, step, reset or get_reward, in seconds from when it begins to run", gt=0
    )
    num_workers: int = arg(32, "threads of a rank for them; all async functions share one event loop", ge=1, le=1024)
    join: int = arg(
        32,
        "decoding steps after which answers join the batch; 0: on arrival, so that bfloat16 runs are not"
        " bitwise reproducible",
        ge=0,
        le=COUNT["le"],
    )
    on_error: str = arg(
        "observe",
        "a tool that raises: the model reads the error (observe), the sample ends without a reward (end), or the job "
        "ends (fail)",
        choices=("observe", "end", "fail"),
    )
    max_error_fraction: float = arg(
        0.5,
        "largest fraction of a rollout's samples, of all ranks, with code of an environment that raised or ran too "
        "long; more end the job",
        gt=0,
        le=1,
    )
    format: str = arg("hermes", "form in which the model writes calls of tools, or module:function of a parser")

    @property
    def used(self) -> bool:
        """Whether there is anything to talk to."""
        return bool(self.path or self.tools or self.tool_config_path)
