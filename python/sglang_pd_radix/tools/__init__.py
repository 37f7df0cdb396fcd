"""The commands of ``pd-radix`` and their parts."""
