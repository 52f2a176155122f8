"""What a call to an engine is, for those who make one without vllm: agent workers, capture replicas, the driver."""
