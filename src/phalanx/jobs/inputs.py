"""What a job reads, looked at before any rank starts: data files and the model folder's headers, without torch.

The ranks look again, and closer: at images, at classes of libraries, at tensors.
"""

from phalanx.config.flow import FlowRunConfig
from phalanx.config.lm import LMRunConfig
from phalanx.data.prompts import load_prompts, validation_sets
from phalanx.models.flow.headers import local_index
from phalanx.models.lm.headers import check_folder


def check_flow(cfg: FlowRunConfig, *, prompts: bool = True) -> None:
    """Raise ValueError, in one line, for files of a flow-matching job that cannot be read. With `prompts` the training
    files hold prompts, otherwise something else.
    """
    local_index(cfg.model.path)
    if prompts and cfg.data.train_files:
        load_prompts(cfg.data.train_files, "data.train_files", prompt=cfg.data.prompt_key)
    validation_sets(cfg.data.val_files, prompt=cfg.data.prompt_key)


def check_lm(cfg: LMRunConfig, *, answered: bool = False) -> None:
    """Raise ValueError, in one line, for files of a language model's job that cannot be read; `answered`: see
    load_prompts.
    """
    check_folder(cfg.model.path)
    key = cfg.data.prompt_key
    if cfg.data.train_files:
        load_prompts(cfg.data.train_files, "data.train_files", prompt=key, quoted=False, answered=answered)
    validation_sets(cfg.data.val_files, prompt=key, quoted=False, answered=answered)
