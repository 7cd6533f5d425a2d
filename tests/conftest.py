"""Shared fixtures: the real demo model, loaded once a worker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

torch.set_num_threads(1)  # two workers on two cores


@pytest.fixture(scope="session")
def smollm() -> tuple[Any, Any]:
    """The real SmolLM2-135M and its tokenizer."""
    from sinklens.models import load

    return load("demo", dtype="float32")
