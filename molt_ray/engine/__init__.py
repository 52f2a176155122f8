"""All that touches vLLM, a room for each process that it runs in.

| room | what | runs in | imports vllm |
|---|---|---|---|
| `calls/` | what a call to an engine is, and how it gets there | agent workers, capture replicas, the driver | no |
| `fleet/` | all engines of a run: pause, refit, resume; the Roster; scaling | the driver, the Roster actor, Serve's controller | no |
| `policy/` | one vLLM engine: ids in; ids, log-probs and versions out | engine replicas | yes |
| `weights/` | both ends of the weight transfer | the trainer's rank 0, engine workers | yes |
| `api/` | vLLM's API application over capture sessions | capture replicas | yes |

tests/test_imports.py holds the last column.
"""
