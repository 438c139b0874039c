"""A policy on the meta device: the part of it that flow models and language models have in common."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from phalanx.config.run import ParallelConfig
from phalanx.models.trained import TrainedModel
from phalanx.plan.layout import Cluster, Layout
from phalanx.plan.ledger import Ledger


class CountedPolicy:
    """A base in front of FlowPolicy or LMPolicy, whose ledger hears of gathered weights and of copies of weights.

    `layout`: the weights on a rank of the cluster. `files`: the folder of the trained model's weights. `tokens`: length
    of a language model's longest sample, 0 for images. `encoders`, `decoders` and `components` of the pipeline, and
    `image_columns` of prompts, belong to flow models.
    """

    trained: TrainedModel
    config: Any
    ledger: Ledger
    layout: Layout
    blocks: list[nn.Module]
    files: Path
    tokens = 0
    encoders: Sequence[nn.Module] = ()
    decoders: Sequence[nn.Module] = ()
    components: Mapping[str, Any] = {}
    image_columns: Sequence[str] = ()

    def count(self, ledger: Ledger, blocks: list[nn.Module], parallel: ParallelConfig, cluster: Cluster) -> None:
        """Once it is made: its ledger, and its layout on a cluster."""
        self.ledger, self.blocks = ledger, blocks
        self.layout = Layout.of(self.trained, blocks, parallel, cluster)

    def unsharded(self) -> AbstractContextManager[None]:
        """Count a round of forward passes that may share gathered weights."""
        self.ledger.phase.rounds += 1
        return self.trained.unsharded()

    def using(self, weights: str) -> AbstractContextManager[None]:
        """Note that the weights are copied, without a copy, which would be one of all weights."""
        if self.trained.is_base(weights):
            return self.trained.using(weights)
        self.ledger.phase.aside = True
        return nullcontext()
