"""Random weights from a fixed stream of bits, and the sizes that keep a made model sensitive and stable."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Tensor = np.ndarray[Any, np.dtype[np.float32]]


class Weights:
    """Uniform random matrices of a given standard deviation, from one fixed stream of bits."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.PCG64(seed)

    def matrix(self, rows: int, columns: int, std: float) -> Tensor:
        """A ``rows`` x ``columns`` float32 matrix with independent entries of mean 0 and deviation ``std``."""
        count = rows * columns
        raw = self._bits.random_raw(-(-count // 4)).astype("<u8").view("<u2")[:count]
        unit = (raw.astype(np.float32) + np.float32(0.5)) / np.float32(32768) - np.float32(1)
        return (unit * np.float32(std * math.sqrt(3))).reshape(rows, columns)

    def linear(self, out_features: int, in_features: int, gain: float = 1.0) -> Tensor:
        """A linear layer that turns an input of rms 1 into an output of rms ``gain``."""
        return self.matrix(out_features, in_features, gain / math.sqrt(in_features))


def ones(size: int, value: float = 1.0) -> Tensor:
    return np.full(size, value, dtype=np.float32)


def rms(rows: Tensor) -> Tensor:
    """The root mean square of each row, (rows, 1)."""
    return np.sqrt(np.mean(np.square(rows, dtype=np.float64), axis=1, keepdims=True)).astype(np.float32)


# Deviation of the attention scores. At 1.5, a query over 1000 tokens attends to about 1000 / e^2.25 = 100 of them. More
# makes single tokens count more, and float32 rounding too: the two grow together, and this is where 32 tokens of answer
# show almost any changed KV while rounding flips about one token in 200 000.
SCORE_STD = 1.5
EMBED_STD = 0.7
ATTENTION_GAIN = 3.0
MLP_GAIN = 3.0  # what keeps answers free of repetition: the next token follows from the last one by no simple rule
LOGIT_STD = 4.0
ROPE_THETA = 10000.0
