"""Seeds are functions of names. The numbers below must never change, or resumed runs would get different noise."""

import itertools
import subprocess
import sys

import pytest
import torch

from phalanx.distributed.seed import fold_in, normal
from tests.helpers.ranks import LIMIT_S, launch_environment

GOLDEN: list[tuple[tuple[int | str, ...], int]] = [
    ((), 6510301506637419378),
    ((0,), 893442142816765029),
    ((1,), 9116012252223111705),
    ((-1,), 1623352975185328750),
    ((0, 1), 4059051691542397301),
    ((1, 0), 5983670273984330465),
    ((2**62,), 1810133564625037210),
    ((-(2**63),), 2543904115474403623),
    (("init",), 1583116544535601453),
    (("",), 8920488384420091552),
    (("a", "b"), 3776915768318390049),
    (("ab",), 3434079536983183616),
    (("é",), 6108700391148028759),
    ((0, 1, 2, 3, "init"), 5347943132767175076),  # the first noise of image 3 of prompt 2 in step 1
    ((0, 1, 2, 3, "step", 4), 6456701563446389500),
]
CPU = torch.device("cpu")


@pytest.mark.parametrize(("names", "seed"), GOLDEN)
def test_golden_values(names: tuple[int | str, ...], seed: int) -> None:
    assert fold_in(*names) == seed


def test_another_process_agrees() -> None:
    """Unlike Python's hash() of a text, which differs between processes."""
    code = "from phalanx.distributed.seed import fold_in; print(fold_in(0, 1, 2, 3, 'step', 4))"
    said = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=launch_environment(),
        timeout=LIMIT_S,
    )
    assert int(said.stdout) == 6456701563446389500


def test_streams_do_not_meet() -> None:
    """All noise of a small run: seeds, training steps, prompts, images, denoising steps."""
    names = [(*n, "init") for n in itertools.product(range(2), range(4), range(6), range(8))]
    steps = [(*n, "step", i) for n in itertools.product(range(2), range(4), range(6), range(8)) for i in range(5)]
    seeds = {fold_in(*n) for n in [*names, *steps]}
    assert len(seeds) == len(names) + len(steps)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)  # the bits that a CPU's generator uses


def test_the_order_and_the_bounds_of_names_count() -> None:
    assert len({fold_in(1, 2), fold_in(2, 1), fold_in(12), fold_in("12"), fold_in("1", "2"), fold_in(1, "2")}) == 6


def test_normal_is_a_function_of_its_seed_alone() -> None:
    torch.manual_seed(0)
    first = normal((3, 5), fold_in(0, "a"), CPU)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(normal((3, 5), fold_in(0, "a"), CPU), first)
    assert torch.equal(torch.get_rng_state(), state)  # the global stream is left alone
    assert not torch.equal(normal((3, 5), fold_in(0, "b"), CPU), first)
    assert first.dtype == torch.float32


def test_normal_is_standard_normal_and_streams_are_independent() -> None:
    noise = torch.stack([normal((40_000,), fold_in(0, i), CPU) for i in range(4)])
    assert noise.mean(1).abs().max() < 0.025  # five standard errors
    assert (noise.std(1) - 1).abs().max() < 0.02
    correlation = torch.corrcoef(noise) - torch.eye(4)
    assert correlation.abs().max() < 0.025
