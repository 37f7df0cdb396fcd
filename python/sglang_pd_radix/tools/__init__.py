"""The operator's tools: the commands of ``pd-radix`` and what they are made of."""
