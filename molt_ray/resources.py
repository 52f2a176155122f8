"""What each node of the graph asks of the cluster: the one place with these numbers.

Without GPUs all of it must fit on two CPU cores beside one task of Ray Data, so the processes ask for fractions; Ray's CPUs are
tickets, not pinning. With GPUs an engine takes `tensor_parallel_size` and a trainer rank one.
"""

ENGINE_CPUS = 0.3
CAPTURE_CPUS = 0.1
AGENT_WORKER_CPUS = 0.1
TRAINER_CPUS = 0.2
SCORER_CPUS = 0.1  # reference and critic ranks: the policy's wait for what they add
