"""How one route is attached to a real model; nothing else knows transformers or TransformerLens."""

from __future__ import annotations

import sys

from torch import nn

from sinklens.backends.protocol import Backend, CallLog
from sinklens.errors import UnsupportedModelError

__all__ = ["Backend", "CallLog", "backend_for"]


def backend_for(model: object) -> Backend:
    """The backend that serves a loaded model.

    Raises:
        UnsupportedModelError: The object is neither a transformers model nor has TransformerLens hooks.
    """
    # A transformers model can only exist if its library is imported; nobody else pays for the import.
    library = sys.modules.get("transformers")
    if library is not None and isinstance(model, library.PreTrainedModel):
        from sinklens.backends.huggingface import huggingface

        return huggingface(model)
    if isinstance(model, nn.Module) and all(hasattr(model, name) for name in ("hook_dict", "cfg", "run_with_hooks")):
        from sinklens.backends.bridge import hooked

        return hooked(model)
    raise UnsupportedModelError(
        "this object cannot be routed",
        expected="a transformers PreTrainedModel, a TransformerBridge or a model with TransformerLens hooks",
        got=type(model).__name__,
    )
