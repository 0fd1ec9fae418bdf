"""Pages from templates. Everything that is put into them is escaped, and has no control characters."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from trainkit_report.charts import legend
from trainkit_report.lines import STYLE

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
"""The folder of the templates of this distribution; those of others extend its ``page.html``."""


def render(template: Path, **values: Any) -> str:
    """Return the page of a template, which extends ``page.html`` of `TEMPLATES`.

    Raises:
        jinja2.UndefinedError: the template uses a value that is not given.
    """
    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    made = _environment(template.parent).get_template(template.name)
    page = made.render(version=version("trainkit-rl"), written=written, **values)
    return "".join(character if character.isprintable() or character == "\n" else " " for character in page)


@cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"charts_css": Markup(STYLE), "legend": legend}
    return made
