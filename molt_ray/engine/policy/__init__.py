"""One vLLM engine as training needs it. Runs in the engine replica; imports vllm."""
