"""Pages of HTML that need no other file and no network, and charts in them as inline SVG."""

from trainkit.report.charts import Bars, Line, histogram, horizontal_bars, line_chart, mean, parts_of, text_chart
from trainkit.report.page import render
from trainkit.report.tables import number, table

__all__ = [
    "Bars",
    "Line",
    "histogram",
    "horizontal_bars",
    "line_chart",
    "mean",
    "number",
    "parts_of",
    "render",
    "table",
    "text_chart",
]
