"""The graph: what a cluster cannot hold is said before anything starts, with the remedy."""

import pytest

from graphs import evaluate, replay, rl, rollout
from graphs.graph import Edge, Graph, Node
from molt_ray.config import Config


def graph(ranks: int, gpus: float = 0) -> Graph:
    nodes = [
        Node("PolicyEngine", "vLLM", 1, 0.3, gpus, "vllm.num_engines"),
        Node("TrainerRank", "FSDP2", ranks, 0.2, gpus, "actor.num_gpus_per_node"),
    ]
    return Graph(nodes, [Edge("TrainerRank", "PolicyEngine", "weights")])


def test_a_fitting_graph_says_so():
    assert graph(2).problems({"CPU": 2}) == []
    assert "fits" in graph(2).render({"CPU": 2}) and "──▶" in graph(2).render({"CPU": 2})


@pytest.mark.parametrize(
    ("ranks", "gpus", "cluster"), [(8, 0, {"CPU": 2}), (2, 1, {"CPU": 64, "GPU": 2}), (2, 1, {"CPU": 64})]
)
def test_what_does_not_fit_is_named_with_the_option(ranks: int, gpus: float, cluster: dict):
    (problem,) = graph(ranks, gpus).problems(cluster)
    assert "TrainerRank" in problem and "--actor.num_gpus_per_node" in problem


def test_room_for_ray_data_is_kept():
    assert graph(2).problems({"CPU": 1.5}) != []


def test_each_graph_declares_the_nodes_that_it_starts_and_edges_between_them():
    sampling, outside = {"AgentWorker", "PolicyEngine"}, {"GroupPool", "Records", "HeldOut"}
    beside = Config(eval={"num_engines": 2}, vllm={"num_engines": 4, "max_engines": 8})
    kept = {"EvalWorker", "EvalEngine", "EvalCapture"}
    declared = {
        "train": (rl.declare(Config(), "chat", gpus=False), {*sampling, "Capture", "TrainerRank"}),
        "evaluation beside": (rl.declare(beside, "chat", gpus=True), {*sampling, "Capture", "TrainerRank", *kept}),
        "rollouts alone": (rollout.declare(Config(), "env", gpus=False), sampling),
        "evaluation alone": (evaluate.declare(Config(), "chat", gpus=False), {*sampling, "Capture"}),
        "replay": (replay.declare(Config(), gpus=False), {"TrainerRank"}),
    }
    for what, (made, nodes) in declared.items():
        assert {node.name for node in made.nodes} == nodes, what
        assert {end for edge in made.edges for end in (edge.source, edge.target)} - outside == nodes, what
    engines = {node.name: node for node in declared["evaluation beside"][0].nodes}
    assert (engines["EvalEngine"].count, engines["EvalEngine"].gpus, engines["PolicyEngine"].count) == (2, 1, 8)
    assert engines["EvalEngine"].option == "eval.num_engines"
