"""The processes of a run by what they do, for benchmarks that pin, kill or weigh them."""

from __future__ import annotations

import re

import psutil

# By command line: the first pattern that matches.
ROLES = {
    "engine core": r"VLLM::EngineCore",
    "engine replica": r"ServeReplica:.*:PolicyEngine",
    "capture replica": r"ServeReplica:.*:Capture",
    "agent worker": r"ServeReplica:.*:AgentWorker",
    "trainer rank": r"ray::TrainerRank",
    "driver": r"jobs/train\.py",
    "Serve controller": r"ray::ServeController",
    "Serve proxy": r"ray::ProxyActor",
    "roster": r"ray::RosterActor",
    "raylet": r"raylet/raylet",
    "GCS": r"gcs_server",
}


def living() -> list[tuple[str, psutil.Process]]:
    """The processes under this one that have a role."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        role = next((role for role, pattern in ROLES.items() if re.search(pattern, command)), None)
        if role is not None:
            found.append((role, process))
    return found


def pin(role: str, core: int) -> int:
    """Binds all threads of the role's processes to one core; how many processes there were."""
    mine = [process for name, process in living() if name == role]
    for process in mine:
        for thread in process.threads():
            psutil.Process(thread.id).cpu_affinity([core])
    return len(mine)
