"""Rows of ``req_to_token`` whose slots are not those of the step before.

Upstream: none is known for triton; sgl-project/sglang#23184 and #29288 (open) are FlashInfer's cascade.
"""

from __future__ import annotations

from typing import Any


class WrittenRows:
    """Rows of ``req_to_token`` that were written other than by appending a decode step's token.

    What a row holds is set when its request is admitted, and again when the prefix cache takes the request's KV in and
    gives it the slots it had already. The second, and on some paths the first, goes through the pool's ``write`` with a
    slice of positions. Where a Triton kernel writes the first, the row was given out by ``alloc`` before.
    """

    def __init__(self, pool: Any) -> None:
        self.rows: set[int] = set()
        write, alloc = pool.write, pool.alloc

        def noted_write(indices: Any, values: Any) -> None:
            if isinstance(indices[1], slice):
                self.rows.add(int(indices[0]))
            write(indices, values)

        def noted_alloc(*args: Any, **kwargs: Any) -> Any:
            rows = alloc(*args, **kwargs)
            self.rows.update(rows or ())
            return rows

        pool.write, pool.alloc = noted_write, noted_alloc
