"""What the engine takes for granted and a host lacks: a GPU, float32 on one, the system libraries of Mooncake."""
