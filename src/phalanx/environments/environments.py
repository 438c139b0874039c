"""The environments of a rank."""

from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import replace
from typing import Any

from phalanx.config.environment import EnvironmentConfig
from phalanx.config.messages import ConfigError, told_as
from phalanx.environments.conversation import Conversation
from phalanx.environments.pool import Pool
from phalanx.environments.registry import COLUMN, build_kinds, kind_of
from phalanx.environments.turn import EnvironmentFailure
from phalanx.types import Prompt


class Environments:
    """All environments of a job on this rank, and the threads that run them."""

    def __init__(self, cfg: EnvironmentConfig) -> None:
        """Resolve classes and tools. Raises ConfigError, in one line, for those that cannot be used."""
        self._cfg = cfg
        self._kinds = build_kinds(cfg)
        self._pool = Pool(cfg.num_workers, cfg.timeout_s)
        self._conversations: list[Conversation] = []  # those that `check` has not counted yet

    @property
    def names(self) -> list[str | None]:
        """Names of the environments, the values of the data's column `environment`; [None] if there is only one."""
        return list(self._kinds)

    @property
    def rewards_turns(self) -> bool:
        """Whether any environment rewards single turns."""
        return any("step" in kind.hooks and "get_reward" not in kind.hooks for kind in self._kinds.values())

    def tools(self, name: str | None = None) -> list[dict[str, Any]]:
        """The schemas of an environment's tools, in OpenAI's format, for the chat template."""
        return [tool.schema for tool in self._kinds[name].tools.values()]

    def check_row(self, row: dict[str, Any]) -> None:
        """Raise ValueError, with the reason as a phrase, for a row of the data that names no known environment."""
        kind_of(row, self._kinds)

    def open(self, row: dict[str, Any], seed: int, sample_seed: int) -> Conversation:
        """Begin the conversation of a sample. `row` has the prompt and the other columns of the data; `seed` is that of
        the group, whose samples begin alike, and `sample_seed` the sample's own. Columns of these names override them.
        """
        row = {"seed": seed, "sample_seed": sample_seed} | row
        conversation = Conversation(kind_of(row, self._kinds), row, self._pool, self._cfg)
        self._conversations.append(conversation)
        return conversation

    def check(self, total: Callable[[int], int] = int) -> str | None:
        """The first failure on this rank since the last check; None if there was none. Raises EnvironmentFailure, on
        ranks with failures, if more than environment.max_error_fraction of all conversations had one; those that are
        paused or still closing are counted later. `total` sums over the ranks, which all call this method.
        """
        waiting: list[Conversation] = []
        conversations: list[Conversation] = []
        for each in self._conversations:
            closing = each.closed is not None and not each.closed.done()
            (waiting if each.paused or closing else conversations).append(each)
        self._conversations = waiting
        failed = [conversation for conversation in conversations if conversation.failures]
        count, of = total(len(failed)), total(len(conversations))
        for conversation in conversations:
            if conversation.closed is not None:
                conversation.closed.result()  # raises with on_error=fail
        if not failed:
            return None
        if count > self._cfg.max_error_fraction * of:
            raise EnvironmentFailure(
                f"{failed[0].problem}; {count} of {of} samples failed in this or another way, more than "
                f"environment.max_error_fraction={self._cfg.max_error_fraction:g}"
            )
        return failed[0].problem

    def abandon(self) -> None:
        """Close all instances because a failure ends the job; instances with a running call are closed after it."""
        self._close_all(2 * self._cfg.timeout_s)  # the time limits of the running call and of close

    def close(self) -> None:
        """Close all instances, and end the threads."""
        self._close_all()
        self._pool.close()

    def _close_all(self, timeout_s: float | None = None) -> None:
        for conversation in self._conversations:
            conversation.close()
        wait([each.closed for each in self._conversations if each.closed is not None], timeout_s)


def with_tools(rows: Iterable[Prompt], environments: Environments) -> list[Prompt]:
    """Return the rows with the tools of their environments, for the chat template. Raises ConfigError for a row without
    an environment, or with its own tools, which no environment would run.
    """
    result = []
    for row in rows:
        with told_as(ConfigError, f"{row.place}: "):
            environments.check_row(row.meta)
        if row.meta.get("tools"):
            raise ConfigError(
                f"{row.place}: it has its own tools, in the column tools, which no environment runs; leave them out"
            )
        name = None if None in environments.names else row.meta[COLUMN]
        result.append(replace(row, meta=row.meta | {"tools": environments.tools(name)}))
    return result
