"""Pages from templates. Everything that is put into them is escaped, and has no control characters."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from trainkit.report.charts import STYLE, legend

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """Return the page of a template in ``trainkit/report/templates``, which extends ``page.html``.

    Raises:
        jinja2.UndefinedError: the template uses a value that is not given.
    """
    written = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    page = _environment().get_template(template).render(version=version("trainkit-rl"), written=written, **values)
    return "".join(character if character.isprintable() or character == "\n" else " " for character in page)


@lru_cache(1)
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"charts_css": Markup(STYLE), "legend": legend}
    return made
