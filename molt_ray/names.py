"""What the Serve applications, deployments and named actors of a run are called. No other module spells such a name.

Guarantees: `<run>.eval` stands for a run's evaluations and is no other run's name; nothing heavy is imported.
"""

from __future__ import annotations

NAMESPACE = "molt"  # of the run's own named actors
SERVE_NAMESPACE = "serve"  # where Serve names its replicas

# Part of a run -> the one deployment in its application.
DEPLOYMENTS = {"engine": "PolicyEngine", "capture": "Capture", "agents": "AgentWorker"}


def app_name(run_name: str, part: str) -> str:
    """The Serve application of a part, a key of DEPLOYMENTS."""
    return f"{run_name}-{part}"


def evaluation_name(run_name: str) -> str:
    """The name in whose place engines and workers kept for evaluations run. The dot keeps it apart from every run's own."""
    return f"{run_name}.eval"


def applications_of(run_name: str) -> set[str]:
    """The applications of all that a run may start, for its evaluations too."""
    return {app_name(name, part) for name in (run_name, evaluation_name(run_name)) for part in DEPLOYMENTS}


def replica_mark(application: str) -> str:
    """How the actor names of an application's replicas begin (Serve 2.60)."""
    return f"SERVE_REPLICA::{application}#"


def roster_name(run_name: str) -> str:
    """The Roster actor, in NAMESPACE."""
    return f"{run_name}-roster"
