"""KV of a decode worker in host memory, below its tree: what has left the pool need not be computed and sent again."""
