"""longread: read a document once, then ask it questions from its complete KV cache."""

from __future__ import annotations

__version__ = "0.1.0"
