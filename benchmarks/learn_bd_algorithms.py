"""Does each token-level algorithm learn with a block-diffusion model? Measured on the quickstart's task, with the same
number of samples, over several seeds.

    python benchmarks/learn_bd_algorithms.py raft --seeds 0 --steps 20

As learn_bd.py, with the recipes of learn_bd_algorithms.yaml.
"""

from dataclasses import replace

from learn_bd import SUBJECT as ESTIMATES
from learning import main

SUBJECT = replace(ESTIMATES, name="learn_bd_algorithms", mark="algorithms", picture="")

if __name__ == "__main__":
    main(SUBJECT, __doc__)
