"""Charts of lines as SVG text, and tables of HTML: what a run shows in notebooks and model cards."""

from trainkit.charts.lines import Line, line_chart, line_over_steps, mean, parts_of
from trainkit.charts.tables import number, table

__all__ = ["Line", "line_chart", "line_over_steps", "mean", "number", "parts_of", "table"]
