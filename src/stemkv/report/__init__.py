"""Pictures and tables people compare, as one self-contained HTML file.

Owns the look. Knows nothing of where the numbers come from.
"""

from stemkv.report.page import Page, Section

__all__ = ["Page", "Section"]
