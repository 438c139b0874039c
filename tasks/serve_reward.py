"""Serve rewards over HTTP for the reward `http` of training jobs. Runs in one process.

NPROC_PER_NODE=1 sh train.sh tasks/serve_reward.py reward.functions='[{name: ocr}]' port=8077
"""

from collections.abc import Callable

from phalanx.config import ConfigError
from phalanx.config.tasks import ServeRewardConfig
from phalanx.run.cli import parse, run


def build(cfg: ServeRewardConfig) -> Callable[[], None]:
    try:
        from phalanx.tools.reward_server import RewardServer
    except ModuleNotFoundError as error:
        raise ConfigError(f"the package {error.name} is not installed; pip install 'phalanx[serve]'") from error

    return RewardServer(cfg).run


if __name__ == "__main__":
    run(build, parse(ServeRewardConfig, __doc__ or ""))
