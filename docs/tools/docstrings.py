"""Docstrings as the documentation site wants them: roles become code, examples become a section of their own."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Plain(griffe.Extension):
    """Rewrites docstrings while they are collected."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Turn ``:meth:`Name.method``` into code, and ``Example:`` into the section that shows doctests."""
        if obj.docstring is not None:
            text = re.sub(r":(?:meth|func|class|mod|data|attr):`~?([^`]+)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
