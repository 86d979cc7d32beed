"""torch's fake tensors, which have shapes and no values: the one place that names where torch keeps them."""

from __future__ import annotations

# Private: torch.compile and torch.export trace with them. tests/hardware/virtual/test_shapes.py fails loudly should
# they change.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

__all__ = ["NEEDS_VALUES", "FakeTensor", "FakeTensorMode"]

# An operation wants to read a value, gives as many elements as values say, or has no form without values.
NEEDS_VALUES = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
