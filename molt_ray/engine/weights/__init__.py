"""Both ends of a refit: the trainer's rank 0 and the engines' workers. Imports vllm and torch.distributed."""
