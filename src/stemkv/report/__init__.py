"""Pictures and tables people compare, as one self-contained HTML file.

Owns the look. Knows nothing of where the numbers come from. The pages of a replay and a
sweep, Parquet and Perfetto files are in modules of their own.
"""

from stemkv.report.page import Chart, Fact, Page, Section

__all__ = ["Chart", "Fact", "Page", "Section"]
