"""A worker extension for tests: switches the repairs of a CPU reload off and on inside the engine's process."""

from molt_ray.engine.weights import checks, transfer


class RepairsSwitch(transfer.WorkerExtension):
    def switch_repairs(self, on: bool) -> None:
        transfer.repack_tied_heads = checks.repack_tied_heads if on else lambda model: None
        transfer.reset_moe_kernels = checks.reset_moe_kernels if on else lambda model: []
