"""Models: torchtitan's modules put together to families, the router, the experts, their balance."""
