"""Put a supervised job together."""

from phalanx.config.run import EmaConfig, RunConfig
from phalanx.rewards.client import RewardClient
from phalanx.run.exporting import exports_of
from phalanx.run.job import Job
from phalanx.run.kind import kind_of
from phalanx.run.start import JobComponents
from phalanx.run.validation import Validator
from phalanx.telemetry.timers import Timers
from phalanx.training.optim import TrainState
from phalanx.training.supervised import SupervisedTrainer, Task


def supervised_trainer(cfg: RunConfig, components: JobComponents, task: Task, ema: EmaConfig) -> SupervisedTrainer:
    """Build the job; all ranks call this together. Raises ValueError for a checkpoint or folder that cannot be used."""
    world, policy, rollout, timers = components.world, components.policy, components.rollout, Timers()
    assert rollout is not None, "each rank validates"
    steps = cfg.trainer.total_training_steps
    if steps is None:
        assert cfg.trainer.total_epochs is not None
        steps = -(-int(cfg.trainer.total_epochs * task.shares.samples) // task.shares.batch_size)
    state = TrainState(policy.trained, cfg.optim, steps, ema=ema, offload=cfg.parallel.optimizer_offload)
    rewards = RewardClient(cfg, world, components.rewards, timers, components.noun)
    validator = Validator(cfg, world, policy, rollout, rewards, components.val_sets, timers)
    batch = f"{cfg.data.batch_size(world.data_size)} prompts"
    exports = exports_of(cfg.trainer, {"": kind_of(cfg)})
    job = Job(cfg, world, {"": state}, validator, timers, steps, batch=batch, exports=exports)
    return SupervisedTrainer(job, task)
