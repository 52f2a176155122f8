"""vLLM's API application over capture sessions, with its dialects. Runs in the capture replica; imports vllm."""
