"""Write a checkpoint for stock diffusers: a LoRA as safetensors, a full model as a whole folder.

sh train.sh tasks/export_checkpoint.py checkpoint=outputs/phalanx/quickstart push_to_hub=user/name
"""

from collections.abc import Callable

from phalanx.config.tasks import ExportConfig
from phalanx.run.cli import parse, run


def build(cfg: ExportConfig) -> Callable[[], None]:
    from phalanx.tools.export import Export

    return Export(cfg).run


if __name__ == "__main__":
    run(build, parse(ExportConfig, __doc__ or ""))
