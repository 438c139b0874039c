"""The environments of a rank."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from phalanx.config.environment import EnvironmentConfig
from phalanx.environments.base import EnvironmentFailure
from phalanx.environments.conversation import Conversation
from phalanx.environments.pool import Pool
from phalanx.environments.registry import build_kinds, kind_of


class Environments:
    """All environments of a job on this rank, and the threads that run them."""

    def __init__(self, cfg: EnvironmentConfig) -> None:
        """Resolve classes and tools. Raises ConfigError, in one line, for what cannot be used."""
        self._cfg = cfg
        self._kinds = build_kinds(cfg)
        self._pool = Pool(cfg.num_workers, cfg.timeout_s)
        self._conversations: list[Conversation] = []  # that no `check` has counted

    @property
    def names(self) -> list[str | None]:
        """The names of the environments, which the data's column `environment` has; [None] for only one."""
        return list(self._kinds)

    @property
    def rewards_turns(self) -> bool:
        """Whether there are rewards of single turns."""
        return any("step" in kind.hooks and "get_reward" not in kind.hooks for kind in self._kinds.values())

    def tools(self, name: str | None = None) -> list[dict[str, Any]]:
        """The schemas of an environment's tools, in OpenAI's form, which the chat template gets."""
        return [tool.schema for tool in self._kinds[name].tools.values()]

    def check_row(self, row: dict[str, Any]) -> None:
        """Raise ValueError, with a part of a line, for a row of the data that names no environment."""
        kind_of(row, self._kinds)

    def open(self, row: dict[str, Any], seed: int, sample_seed: int) -> Conversation:
        """The conversation of a sample. `row` has the columns of the data and the prompt; `seed` is the group's, whose
        samples begin alike, and `sample_seed` the sample's own, unless the data have columns of these names.
        """
        row = {"seed": seed, "sample_seed": sample_seed} | row
        conversation = Conversation(kind_of(row, self._kinds), row, self._pool, self._cfg)
        self._conversations.append(conversation)
        return conversation

    def check(self, total: Callable[[int], int] = int) -> str | None:
        """The first failure since the last check, None without one. Raises EnvironmentFailure where a larger part of
        the conversations than environment.max_error_fraction had one. Those that still close count next time. `total`
        sums over the ranks, which all call it: one without a failure of its own does not raise.
        """
        closing = [each for each in self._conversations if each.closed is not None and not each.closed.done()]
        conversations = [each for each in self._conversations if each not in closing]
        self._conversations = closing
        failed = [conversation for conversation in conversations if conversation.failures]
        count, of = total(len(failed)), total(len(conversations))
        for conversation in conversations:
            if conversation.closed is not None:
                conversation.closed.result()  # raises where on_error says so
        if not failed:
            return None
        if count > self._cfg.max_error_fraction * of:
            raise EnvironmentFailure(
                f"{failed[0].problem}; so or in another way {count} of {of} samples failed, more than "
                f"environment.max_error_fraction={self._cfg.max_error_fraction:g}"
            )
        return failed[0].problem

    def abandon(self) -> None:
        """Close all instances, as a failure ends the job: those whose calls still run once these have ended."""
        closing: list[Future[Any]] = []
        for conversation in self._conversations:
            conversation.close()
            if conversation.closed is not None:
                closing.append(conversation.closed)
        wait(closing, timeout=2 * self._cfg.timeout_s)  # of the call, and of close

    def close(self) -> None:
        """Wait until instances are closed, and let the threads end."""
        wait([conversation.closed for conversation in self._conversations if conversation.closed is not None])
        self._pool.close()
