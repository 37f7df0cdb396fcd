"""What running requests share, for decode attention that reads it once: of CPU hosts, and of an extra for GPUs.

prefixes.py         which running requests share which KV slots
levels.py           which of that is worth reading together
written_rows.py     which rows of the table are not what they were in the step before
"""
