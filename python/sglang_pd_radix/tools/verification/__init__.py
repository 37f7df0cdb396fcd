"""The parts of ``pd-radix verify``."""
