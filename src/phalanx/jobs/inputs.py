"""What a job reads, looked at before any rank starts: data files and the model folder's headers, without torch.

The ranks look again, and closer: at images, at classes of libraries, at tensors.
"""

from phalanx.config.flow import FlowRunConfig
from phalanx.data.prompts import load_prompts, validation_sets
from phalanx.models.flow import headers


def check_flow(cfg: FlowRunConfig, *, prompts: bool = True) -> None:
    """Raise ValueError, in one line, for files of a flow-matching job that cannot be read. With `prompts` the training
    files hold prompts, otherwise something else.
    """
    headers.local_index(cfg.model.path)
    if prompts and cfg.data.train_files:
        load_prompts(cfg.data.train_files, "data.train_files", prompt=cfg.data.prompt_key)
    validation_sets(cfg.data.val_files, prompt=cfg.data.prompt_key)
