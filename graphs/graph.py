"""A graph is a plain declaration: the nodes, what each asks of the cluster, and the edges between them.

Guarantees: `problems` names, before anything starts, every node that the cluster cannot hold, with the remedy; nothing waits
for a CPU that is not there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Ray Data runs its reading tasks with one CPU each: leave room for one, or the first read waits for ever.
DATA_TASK_CPUS = 1.0


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    what: str
    count: int
    cpus: float  # each
    gpus: float = 0.0  # each
    option: str = ""  # the flag that sets `count`


def rank_node(name: str, count: int, cpus: float, gpus: bool, option: str) -> Node:
    """A group of torch ranks: without GPUs one process each, else one GPU."""
    return Node(name, "actors: FSDP2", count, cpus, int(gpus), option)


@dataclass(frozen=True, slots=True)
class Edge:
    source: str
    target: str
    carries: str


@dataclass(frozen=True, slots=True)
class Graph:
    nodes: list[Node]
    edges: list[Edge] = field(default_factory=list)

    def problems(self, cluster: dict[str, float]) -> list[str]:
        """One sentence for each reason why `cluster` (Ray's resource totals) cannot hold this graph."""
        out = []
        for resource, room in (("CPU", DATA_TASK_CPUS), ("GPU", 0.0)):
            asks = {n: n.count * (n.cpus if resource == "CPU" else n.gpus) for n in self.nodes}
            need, have = sum(asks.values()) + room, cluster.get(resource, 0.0)
            if need > have + 1e-6:
                most = max(asks, key=lambda n: asks[n])
                data = " (1 of them for Ray Data's tasks)" if room else ""
                out.append(
                    f"the graph needs {need:g} {resource}s{data}, the cluster has {have:g}: {most.name} asks for {asks[most]:g}; "
                    f"lower --{most.option}, or add nodes"
                )
        return out

    def render(self, cluster: dict[str, float]) -> str:
        """The table and the edges that `--plan` prints, and whether the cluster can hold them."""
        lines = [f"{'node':<14}{'count':>6}{'CPUs':>8}{'GPUs':>8}  what"]
        lines += [
            f"{n.name:<14}{n.count:>6}{n.count * n.cpus:>8.2f}{n.count * n.gpus:>8.2f}  {n.what}" for n in self.nodes
        ]
        lines.append("")
        lines += [f"{e.source:<14}──▶ {e.target:<14} {e.carries}" for e in self.edges]
        lines.append("")
        problems = self.problems(cluster)
        have = f"{cluster.get('CPU', 0):g} CPUs, {cluster.get('GPU', 0):g} GPUs"
        lines += [f"cannot run: {p}" for p in problems] or [f"fits: the cluster has {have}"]
        return "\n".join(lines)
