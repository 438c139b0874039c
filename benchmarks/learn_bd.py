"""Which estimate of a block-diffusion model's log-probability learns? Measured on the quickstart's task, with the same
number of samples, over several seeds.

    python benchmarks/learn_bd.py
    python benchmarks/learn_bd.py trace elbo --seeds 0 --steps 20

As learn_lm.py, with the recipes of learn_bd.yaml; the page is docs/block-diffusion.md.
"""

from dataclasses import replace
from functools import partial

from learn_lm import SUBJECT as LANGUAGE
from learn_lm import base
from learning import main

CONFIG = "configs/block_diffusion/quickstart.yaml"
SUBJECT = replace(
    LANGUAGE,
    name="learn_bd",
    config=CONFIG,
    page="block-diffusion.md",
    picture="learning_bd.png",
    steps=40,
    test_freq=5,
    base=partial(base, config=CONFIG),
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
