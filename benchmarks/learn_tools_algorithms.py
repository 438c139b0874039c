"""Does each token-level algorithm learn to call a tool? Measured on the quickstart's task, with the same number of
samples, over several seeds.

    python benchmarks/learn_tools_algorithms.py raft --seeds 0 --steps 20

As learn_tools.py, with the recipes of learn_tools_algorithms.yaml.
"""

from dataclasses import replace

from learn_tools import SUBJECT as TOOLS
from learning import main

SUBJECT = replace(TOOLS, name="learn_tools_algorithms", mark="algorithms")

if __name__ == "__main__":
    main(SUBJECT, __doc__)
