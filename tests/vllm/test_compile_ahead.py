"""benchmarks/compile_ahead.py: kernels for a GPU that this machine does not have, by the Triton of this environment."""

import sys

from tests.helpers.ranks import ROOT, run_ranks


def kernels() -> dict[str, list[tuple[list[int], list[int]]]]:
    """Of a language model's layer of 64 tokens: machine code and shared memory of each kernel, in bytes, by pass."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import compile_ahead

    made = compile_ahead.compile_block(*compile_ahead.layer_of("qwen25_7b", 1, 64), 90)
    return {way: [(kernel.code, kernel.shared) for kernel in some] for way, some in made.items()}


def test_a_layer_is_compiled_for_a_gpu() -> None:
    [made] = run_ranks(kernels, 1, init=False, timeout=240)
    assert made.keys() == {"forward", "backward"}
    for some in made.values():
        assert len(some) >= 5
        for code, shared in some:
            assert (
                code and min(code) > 1000 and max(shared) < 232_448
            )  # what a block may have on compute capability 9.0
