"""All engines of a run as its driver holds them, and their Roster. Imports neither vllm nor torch."""
