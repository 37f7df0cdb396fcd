"""What the engine takes for granted and a host lacks: a GPU, and the system libraries of Mooncake."""
