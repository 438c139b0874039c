"""A configuration's kind, asked by functions."""

from typing import Any

from phalanx.run.kind import kind_of


def plan_of(cfg: Any, ranks: int) -> Any:
    return kind_of(cfg).plan(ranks)


def check_config(cfg: Any) -> None:
    kind_of(cfg).check_config()


def check(cfg: Any) -> Any:
    return kind_of(cfg).check()
