"""Hooks of MkDocs: pages from the READMEs, from the sources and from the settings, and links between them.

The pages link to files as they lie in the repository, so that they can be read there, too. In the site a link leads to
the page of that file.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "docs/site")]

import reference  # noqa: E402

PLACES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""The pages in the site of files whose place does not follow from their name."""
READMES = sorted(
    path.relative_to(ROOT).as_posix()
    for part in ("plugins", "examples", "benchmarks")
    for path in (ROOT / part).rglob("README.md")
)
LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
ELSEWHERE = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*')
"""What a page would load from another server; links that a reader may follow are not meant."""
FENCES = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".sh": "bash", ".c": "c", ".json": "json", ".yaml": "yaml"}


def place(path: str) -> str:
    """Return the page in the site of a file of the repository."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    if plugin := re.fullmatch(r"plugins/(\w+)/README\.md", path):
        return f"{'algorithms' if reference.trains(plugin[1]) else 'plugins'}/{plugin[1]}.md"
    return path.removesuffix("README.md") + "index.md" if path.endswith("README.md") else f"source/{path}.md"


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """Return a page with everything but its fenced blocks changed."""
    parts = FENCES.split(text)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def target(link: str, path: str) -> str | None:
    """Return the file of the repository that a link in ``path`` leads to; None if it leads elsewhere or to a folder."""
    if "://" in link or not link:
        return None
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    if (ROOT / found).is_dir():
        found = posixpath.join(found, "README.md")
    return found if (ROOT / found).is_file() else None


def relinked(text: str, path: str) -> str:
    """Return the text of the file at ``path`` with its links as they are in the site."""

    def change(found: re.Match[str]) -> str:
        words, link, anchor = found[1], found[2], found[3] or ""
        file = target(link, path)
        if file is not None:
            return f"[{words}]({posixpath.relpath(place(file), posixpath.dirname(place(path)))}{anchor})"
        folder = link and "://" not in link and (ROOT / posixpath.dirname(path) / link).is_dir()
        return words if folder else found[0]

    settings = posixpath.relpath("reference/settings.md", posixpath.dirname(place(path)))

    def changed(part: str) -> str:
        done, at = "", 0
        for found in LINK.finditer(part):
            done += reference.link_settings(part[at : found.start()], settings) + change(found)
            at = found.end()
        return done + reference.link_settings(part[at:], settings)

    return outside_of_code(text, changed)


def sources(pages: dict[str, str]) -> dict[str, str]:
    """Return a page for every file that pages link to and that is no page itself: path in the site -> text."""
    found: dict[str, str] = {}
    for path, text in pages.items():
        for link in LINK.finditer("".join(FENCES.split(text)[::2])):
            file = target(link[2], path)
            if file is not None and place(file).startswith("source/"):
                language = LANGUAGES.get(Path(file).suffix, "text")
                code = (ROOT / file).read_text(encoding="utf-8").rstrip()
                found[place(file)] = (
                    f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# {file}\n\n"
                    f'````{language} linenums="1"\n{code}\n````\n'
                )
    return found


def on_config(config: Any) -> Any:
    """Fill the parts of the navigation that are generated."""
    plugins = [path for path in READMES if re.fullmatch(r"plugins/\w+/README\.md", path)]
    folders = {path: Path(path).parent.name for path in plugins}
    entries = [{", ".join(reference.entries(name)) or name: place(path)} for path, name in folders.items()]
    filled = {
        "algorithms/": [entry for entry in entries if next(iter(entry.values())).startswith("algorithms/")],
        "plugins/": [entry for entry in entries if next(iter(entry.values())).startswith("plugins/")],
        "reference/api/": ["reference/api/index.md", *({name: page} for name, page in reference.API.items())],
    }
    config.nav = _filled(config.nav, filled)
    return config


def _filled(nav: Any, parts: dict[str, list[Any]]) -> Any:
    """Return a navigation in which every name of a part is replaced by what belongs there."""
    if isinstance(nav, str):
        return parts.get(nav, nav)
    if isinstance(nav, dict):
        return {title: _filled(part, parts) for title, part in nav.items()}
    return [_filled(part, parts) for part in nav]


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    written = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    readmes = {path: (ROOT / path).read_text(encoding="utf-8") for path in [*PLACES, *READMES] if path[:5] != "docs/"}
    pages = {place(path): relinked(text, path) for path, text in readmes.items()}
    for uri, text in {**pages, **reference.pages(), **sources({**written, **readmes})}.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page of docs/ with the links of the site."""
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{page.file.src_uri}")


@event_priority(-200)  # after the search index is written
def on_post_build(config: Any) -> None:
    """Check that pages load nothing from elsewhere, and that the trainer's methods and the search index are there."""
    site = Path(config.site_dir)
    for page in site.rglob("*.html"):
        if found := ELSEWHERE.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(site)} loads something from elsewhere: {found[0]}")
    trainer = (site / reference.API[reference.TRAINER]).with_suffix(".html").read_text(encoding="utf-8")
    if lost := [n for n in reference.inherited(reference.TRAINER) if f'id="{reference.TRAINER}.{n}"' not in trainer]:
        raise PluginError(f"the page of {reference.TRAINER} lacks {', '.join(lost)}")
    if not (site / "search/search_index.js").is_file():
        raise PluginError("search/search_index.js is missing, without which the search needs a server")
