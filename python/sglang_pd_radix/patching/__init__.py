"""How the patch set reaches the engine: the start of the process, the loader, and the register of what it changes."""
