"""Columns as tensors, for `format="torch"`; `batches.form_of` puts these functions into a `Form`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.random  # numpy loads it when it is first used, which would be in the middle of the first batch
import torch

from memmap_buffer.dtypes import Array
from memmap_buffer.errors import CorruptBufferError
from memmap_buffer.schema import nest
from memmap_buffer.views.gather import BFloat16Bits, Columns


def torch_seed(generator: torch.Generator | None = None) -> int:
    """A seed drawn from torch's generator, so that `manual_seed` fixes it, and every worker has another."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def to_tensor(array: Array) -> Any:
    """A tensor that shares an array's memory; text becomes lists of str."""
    if array.dtype.kind == "U":
        try:
            return array.tolist()
        except ValueError as error:
            raise CorruptBufferError(f"a text field holds what is no text ({error}); see `verify`") from None
    if isinstance(array, BFloat16Bits):
        return torch.from_numpy(array.view(np.ndarray)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_tensors(batch: Mapping[str, Array]) -> dict[str, Any]:
    """A batch of arrays as (nested) tensors."""
    return nest({key: to_tensor(array) for key, array in batch.items()})


def tensors_of(columns: Columns) -> dict[str, Any]:
    """Columns as tensors."""
    from_numpy, tensors = torch.from_numpy, {}
    for key, values in columns.items():  # a comprehension would be one more call before Python 3.12
        is_plain = type(values) is np.ndarray and values.dtype.kind != "U"
        tensors[key] = from_numpy(values) if is_plain else to_tensor(values)
    return tensors


def unpadded(values: Any, lens: torch.Tensor) -> Any:
    """Sequences (B, T, …) cut to their lengths (B,): one jagged nested tensor; of text, lists."""
    if isinstance(values, list):
        return [row[:n] for row, n in zip(values, lens.tolist(), strict=True)]
    mask = torch.arange(values.shape[1]) < lens[:, None]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lens.cumsum(0)])
    return torch.nested.nested_tensor_from_jagged(values[mask], offsets)
