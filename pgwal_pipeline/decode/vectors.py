"""The types of the numpy vectors that the decoder works on."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
"""Positions, lengths, indices."""

Bytes: TypeAlias = NDArray[np.uint8]

Mask: TypeAlias = NDArray[np.bool_]
