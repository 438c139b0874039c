"""A plain-text table with one line per node."""

from collections.abc import Mapping

from phalanx.config.messages import aligned
from phalanx.run.roles import Roles, span
from phalanx.tools.cluster.diagnose import Rates, by_node
from phalanx.tools.cluster.facts import Gpu, Machine
from phalanx.tools.cluster.wording import Nodes

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
    """Format a table with one row per node and `-` for missing values; it shows the roles of ranks if there are any."""
    texts = TEXTS if roles is None else (*TEXTS, "roles")
    rows, (inside, links) = [[*texts, *FIGURES]], by_node(nodes, rates)
    for name, ranks in nodes.items():
        cells: dict[str, str] = {}
        owned = [gpus[rank] for rank in ranks if rank in gpus and gpus[rank].name]
        if owned:
            least = min(owned, key=lambda gpu: gpu.free_gb)
            cells["device"] = f"{len(owned)} x {owned[0].name}"
            cells["GPU GB free"] = f"{least.free_gb:.1f} of {least.memory_gb:.1f}"
        elif ranks[0] in gpus:
            cells["device"] = "cpu"
        if name in machines:
            machine = machines[name]
            cells["RAM GB free"] = f"{machine.memory_free_gb:.1f} of {machine.memory_gb:.1f}"
            cells["/dev/shm GB"] = "none" if machine.shm_free_gb is None else f"{machine.shm_free_gb:.1f}"
            cells["disk GB free"] = f"{machine.disk_free_gb:.1f}"
        if name in ahead:
            cells["clock s"] = f"{ahead[name]:+.3f}"
        if name in inside:
            cells["GB/s inside"] = f"{inside[name]:.3g}"
        if name in links:
            cells["GB/s from node before"] = f"{links[name]:.3g}"
        if roles is not None:
            parts = []
            for role, ranks_of_role in roles.ranks.items():
                here = sorted(set(ranks).intersection(ranks_of_role))
                if here:
                    parts.append(f"{role} {span(here, ', ')}")
            cells["roles"] = ", ".join(parts)
        rows.append([name, span(ranks, ", "), *[cells.get(title, "-") for title in rows[0][2:]]])
    return "\n".join(aligned(rows, len(texts)))
