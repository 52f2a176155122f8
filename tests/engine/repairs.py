"""A worker extension for tests: switches the repairs of a CPU reload off and on inside the engine's process."""

from molt_ray.engine import weight_checks, weight_transfer


class RepairsSwitch(weight_transfer.WorkerExtension):
    def switch_repairs(self, on: bool) -> None:
        weight_transfer.repack_tied_heads = weight_checks.repack_tied_heads if on else lambda model: None
        weight_transfer.reset_moe_kernels = weight_checks.reset_moe_kernels if on else lambda model: []
