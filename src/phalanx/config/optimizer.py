"""The section `optim`: the optimizer of any trained model."""

from dataclasses import dataclass

from phalanx.config.fields import arg
from phalanx.config.ranges import BETAS
from phalanx.config.section import Section


@dataclass
class OptimConfig(Section, name="optim"):
    """The optimizer and its learning rate."""

    name: str = arg(
        "adamw", "adamw, or muon for the blocks' weight matrices and AdamW for the rest", choices=("adamw", "muon")
    )
    lr: float = arg(1e-4, "peak learning rate", gt=0)
    betas: list[float] = arg([0.9, 0.999], "decay rates of AdamW's two moment estimates", valid=BETAS)
    eps: float = arg(1e-8, "epsilon in AdamW's denominator", gt=0)
    weight_decay: float = arg(1e-4, "decoupled weight decay", ge=0)
    grad_clip: float = arg(1.0, "maximum norm of the gradient; 0: no clipping", ge=0)
    lr_scheduler: str = arg("constant", "learning rate after the warm-up", choices=("constant", "linear", "cosine"))
    lr_decay_fraction: float = arg(1.0, "fraction of the steps, at the end, over which the rate decays", gt=0)
    lr_warmup_steps: int = arg(0, "optimizer steps over which the learning rate rises linearly from 0", ge=0)
