"""The trainer. In reading order: `group.py` (the driver's hold on all ranks, no torch), `rank.py` (the Ray actor of one rank), `learner.py`
(its step), `collate.py`, `objective.py`, `optimizer.py`, `value.py` (the critic), `tally.py`; `model/` is what they compute with, `state/`
what leaves them. Only here and in `engine/weights/` is torch.distributed imported (tests/test_imports.py)."""
