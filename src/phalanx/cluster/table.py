"""The nodes in a table: plain text, one line each."""

import io
from collections.abc import Mapping

from phalanx.cluster.diagnose import Rates, by_node
from phalanx.cluster.facts import Gpu, Machine
from phalanx.cluster.messages import Nodes, spans
from phalanx.distributed.roles import Roles

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
    gpus: Mapping[int, Gpu],
    ahead: Mapping[str, float],
    rates: Rates,
    roles: Roles | None = None,
) -> str:
    """A row for each node, with `-` for what was not measured or does not exist there, and with the roles of its ranks
    where these have any.
    """
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=None, pad_edge=False)
    texts = TEXTS if roles is None else (*TEXTS, "roles")
    for title in texts:
        grid.add_column(title, no_wrap=True)
    for title in FIGURES:
        grid.add_column(title, no_wrap=True, justify="right")
    inside, links = by_node(nodes, rates)
    for name, ranks in nodes.items():
        shown: dict[str, str] = {}
        owned = [gpus[rank] for rank in ranks if rank in gpus and gpus[rank].name]
        if owned:
            least = min(owned, key=lambda gpu: gpu.free_gb)
            shown["device"] = f"{len(owned)} x {owned[0].name}"
            shown["GPU GB free"] = f"{least.free_gb:.1f} of {least.memory_gb:.1f}"
        elif ranks[0] in gpus:
            shown["device"] = "cpu"
        if name in machines:
            machine = machines[name]
            shown["RAM GB free"] = f"{machine.memory_free_gb:.1f} of {machine.memory_gb:.1f}"
            shown["/dev/shm GB"] = f"{machine.shm_free_gb:.1f}"
            shown["disk GB free"] = f"{machine.disk_free_gb:.1f}"
        if name in ahead:
            shown["clock s"] = f"{ahead[name]:+.3f}"
        if name in inside:
            shown["GB/s inside"] = f"{inside[name]:.3g}"
        if name in links:
            shown["GB/s from node before"] = f"{links[name]:.3g}"
        if roles is not None:
            here = {role: [rank for rank in ranks if rank in own] for role, own in roles.ranks.items()}
            shown["roles"] = ", ".join(f"{role} {spans(own)}" for role, own in here.items() if own)
        cells = [shown.get(title, "-") for title in (*texts[2:], *FIGURES)]
        grid.add_row(name, spans(ranks), *cells)
    text = io.StringIO()
    Console(file=text, width=1000, highlight=False, markup=False).print(grid)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
