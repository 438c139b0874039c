"""Check within a minute that the machines are fit to train on; accepts all keys of a training task.

sh train.sh tasks/check_cluster.py configs/flowgrpo/quickstart.yaml expect=2
"""

from collections.abc import Callable

from phalanx.config.tasks import CheckClusterConfig
from phalanx.run.cli import parse, run


def build(cfg: CheckClusterConfig) -> Callable[[], None]:
    from phalanx.tools.cluster.check import ClusterCheck

    return ClusterCheck(cfg).run


if __name__ == "__main__":
    run(build, parse(CheckClusterConfig, __doc__ or ""))
