"""Does a policy learn from samples that are one step old, with and without a correction? Measured on the quickstart's
task, with the same number of samples, over several seeds.

    python benchmarks/learn_roles.py
    python benchmarks/learn_roles.py "one step off, none" --seeds 0 --steps 20 --no-docs

As learn_lm.py, with the recipes of learn_roles.yaml on two ranks, a sampling and a training one. The table and the
curves go to docs/placement.md.
"""

from dataclasses import replace

from learn_lm import SUBJECT as LANGUAGE
from learning import main

SUBJECT = replace(
    LANGUAGE,
    name="learn_roles",
    fixed=[*LANGUAGE.fixed, "placement={rollout: 0, actor: 1}"],
    page="placement.md",
    picture="learning_roles.png",
    steps=60,
    ranks=2,
    board=False,
)

if __name__ == "__main__":
    main(SUBJECT, __doc__)
