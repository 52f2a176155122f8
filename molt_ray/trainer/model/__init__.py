"""The policy under FSDP2 and what stands beside it: forward, meshes, vision, routers, shared prefixes. Runs on the ranks."""
