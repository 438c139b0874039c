"""The nodes in a table: plain text, one line each."""

import io
from collections.abc import Iterator, Mapping

from phalanx.cluster.facts import GpuInfo, Machine
from phalanx.cluster.messages import Nodes, spans

TEXTS = ("node", "ranks", "device")
FIGURES = (
    "GPU GB free",
    "RAM GB free",
    "/dev/shm GB",
    "disk GB free",
    "clock s",
    "GB/s inside",
    "GB/s from node before",
)


def table(
    nodes: Nodes,
    machines: Mapping[str, Machine],
    gpus: Mapping[int, GpuInfo],
    ahead: Mapping[str, float],
    rates: Mapping[int, Mapping[str, float]],
) -> str:
    """A row for each node, with `-` for what was not measured or does not exist there."""
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    for title in TEXTS:
        grid.add_column(title, no_wrap=True)
    for title in FIGURES:
        grid.add_column(title, no_wrap=True, justify="right")
    for name, ranks in nodes.items():
        here = [gpus[rank] for rank in ranks if rank in gpus]
        shown = dict(_figures(machines.get(name), here))
        if name in ahead:
            shown["clock s"] = f"{ahead[name]:+.3f}"
        if ranks[0] in rates:
            shown |= _rates([rates[rank] for rank in ranks])
        cells = [shown.get(title, "-") for title in (*TEXTS[2:], *FIGURES)]
        grid.add_row(name, spans(ranks), *cells)
    text = io.StringIO()
    Console(file=text, width=1000, highlight=False, markup=False).print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _figures(machine: Machine | None, infos: list[GpuInfo]) -> Iterator[tuple[str, str]]:
    gpus = [info.gpu for info in infos if info.gpu is not None]
    if gpus:
        yield "device", f"{len(gpus)} x {gpus[0].name}"
        least = min(gpus, key=lambda gpu: gpu.free_gb)
        yield "GPU GB free", f"{least.free_gb:.1f} of {least.memory_gb:.1f}"
    elif infos:
        yield "device", "cpu"
    if machine is not None:
        yield "RAM GB free", f"{machine.memory_free_gb:.1f} of {machine.memory_gb:.1f}"
        yield "/dev/shm GB", f"{machine.shm_free_gb:.1f}"
        yield "disk GB free", f"{machine.disk_free_gb:.1f}"


def _rates(rates: list[Mapping[str, float]]) -> dict[str, str]:
    shown = {}
    if "node" in rates[0]:
        shown["GB/s inside"] = f"{rates[0]['node']:.3g}"
    if "link" in rates[0]:
        shown["GB/s from node before"] = f"{sum(rate['link'] for rate in rates):.3g}"
    return shown
