"""Traces of lengths and arrivals only: Azure's (2023, 2024) and BurstGPT's.

Nothing is known of the prompts, so no request shares anything with another.
"""

from __future__ import annotations

from .fields import Layout
from .line import Line

__all__ = ["AZURE", "BURSTGPT"]


def _is_azure(line: Line) -> bool:
    return line.is_csv and line.get("ContextTokens") is not None


def _is_burstgpt(line: Line) -> bool:
    return line.is_csv and line.get("Request tokens") is not None


# Azure/AzurePublicDataset
AZURE = Layout(
    name="azure",
    description="CSV: TIMESTAMP (UTC), ContextTokens, GeneratedTokens; lengths only",
    recognises=_is_azure,
    fields={
        "arrival": ("TIMESTAMP:iso",),
        "input_length": ("ContextTokens",),
        "output_length": ("GeneratedTokens",),
    },
)

# HPMLL/BurstGPT
BURSTGPT = Layout(
    name="burstgpt",
    description="CSV: Timestamp (s), Model, Request tokens, Response tokens; "
    "lengths only",
    recognises=_is_burstgpt,
    fields={
        "arrival": ("Timestamp:s",),
        "input_length": ("Request tokens",),
        "output_length": ("Response tokens",),
        "model": ("Model",),
        "session": ("Session ID",),
    },
)
