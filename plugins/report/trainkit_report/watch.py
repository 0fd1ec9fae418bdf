"""A page about runs that is served while they go on: the report of them, their newest rollouts, and their tokens.

The server reads the files of the runs, listens on loopback alone, and answers GET for the page and its script.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, islice, zip_longest
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from markupsafe import Markup

from trainkit.errors import ConfigError, TrainkitError, printable
from trainkit.plugins.guard import one_line
from trainkit.runs.lock import NAME, is_held
from trainkit.runs.record import Record, find_runs, lines_of
from trainkit_report.groups import name_of, runs_at
from trainkit_report.page import TEMPLATES, render
from trainkit_report.report import is_number, measures, report, shown, thumbnails

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Names by which the server is asked; other names would let pages of other sites read it (DNS rebinding)."""
FILES = ("config.yaml", "starts.jsonl", "metrics.jsonl", "samples.jsonl", "newest.jsonl", "health.jsonl", "model")
"""What the page is made of, in the directory of a run."""
ROWS, CHARACTERS = 40, 600
"""Rollouts that the page has at most, and characters of a text in their table."""
KEPT = 16
"""Responses that are kept after they were opened, because a newer collection takes their place in the file."""
MEASURES = {"logprob": "log-probability", "advantage": "advantage", "kl": "KL from the reference"}
"""What may be known of a token."""
MOST = 0.6
"""The part that the strongest colour of a token has, so that its text can be read."""
SCRIPT = (Path(__file__).parent / "watch.js").read_bytes()
Rollout = dict[str, Any]


@dataclass(frozen=True)
class Search:
    """Which rollouts are shown, from the query of the page."""

    text: str = ""
    """What prompt or output contains, in upper or lower case."""
    kind: str = ""
    """``rollout`` or ``evaluation``; empty for both."""
    by: str = "reward"
    """The number that bounds and order are about."""
    least: float = -math.inf
    most: float = math.inf
    order: str = ""
    """``highest`` or ``lowest`` first; otherwise the newest."""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Search:
        """Return the search of a query; a bound that is no number is an error.

        Raises:
            ConfigError: names it.
        """
        bounds = {}
        for name in ("least", "most"):
            if given := query.get(name, "").strip():
                try:
                    bounds[name] = float(given)
                except ValueError:
                    raise ConfigError(f"{name} is {given!r}; give a number, or nothing") from None
        texts = {name: query[name] for name in ("text", "kind", "by", "order") if query.get(name)}
        return cls(**texts, **bounds)  # type: ignore[arg-type]

    def matches(self, row: Rollout) -> bool:
        """Return whether a rollout is shown."""
        if self.kind and row.get("kind") != self.kind:
            return False
        value = row.get(self.by)
        if (self.least, self.most) != (-math.inf, math.inf) and not (
            is_number(value) and self.least <= value <= self.most
        ):
            return False
        texts = (shown(row.get(name, ""), 100_000).casefold() for name in ("prompt", "output"))
        return not self.text or any(self.text.casefold() in text for text in texts)

    def first(self, rows: Iterable[Rollout]) -> list[Rollout]:
        """Return the rollouts that are shown, in order."""
        found = filter(self.matches, rows)
        if self.order not in ("highest", "lowest"):
            return list(islice(found, ROWS))
        sign = 1 if self.order == "highest" else -1
        numbered = (row for row in found if is_number(row.get(self.by)) and math.isfinite(row[self.by]))
        return heapq.nlargest(ROWS, numbered, key=lambda row: sign * row[self.by])


@dataclass
class Watch:
    """The page about the runs that directories are, or have in them."""

    places: Sequence[Path]
    opened: dict[str, tuple[str, Rollout]] = field(default_factory=dict)

    def state(self) -> str:
        """Return what changes whenever files of the runs do."""
        mark = hashlib.sha256()
        for run in chain.from_iterable(map(find_runs, self.places)):
            lock = run.path / NAME
            mark.update(repr((run.path, lock.exists() and is_held(run.path))).encode())
            for path in (run.path / name for name in FILES):
                with suppress(OSError):  # it is not there, or no longer
                    mark.update(repr((path.name, path.stat().st_mtime_ns, path.stat().st_size)).encode())
        return mark.hexdigest()

    def page(self, query: Mapping[str, str]) -> str:
        """Return the page for a query: a search, and the response that is opened.

        What is wrong with the runs, or with the response that is opened, is a page with the sentence that says so.
        """
        live = {"refreshes": "open" not in query}
        try:
            return self._page(query, live)
        except TrainkitError as error:
            why = str(error)
        except Exception as error:  # files of another version may hold anything; the next request is answered as well
            why = f"the files of the run have something that this page does not know ({one_line(error)})"
            log.warning("%s", why)
        return render(TEMPLATES / "message.html", title="No page yet", why=printable(why), **live)

    def _page(self, query: Mapping[str, str], live: dict[str, Any]) -> str:
        runs, notices = runs_at(self.places), list[str]()
        try:
            search = Search.of(query)
        except ConfigError as error:
            search = Search()
            notices.append(f"Everything is shown: {error}")
        everything = [run.path for run in runs]
        found = {name_of([run], everything): run for run in runs}
        rollouts, faults = dict[str, list[Rollout]](), dict[str, TrainkitError]()
        for name, run in found.items():
            try:
                rollouts[name] = [*rollouts_of(name, run)]
            except TrainkitError as error:
                faults[name] = error
        if not rollouts:
            raise next(iter(faults.values()))
        notices += [f"The run {name} is left out: {fault}" for name, fault in faults.items()]
        names = {name: found[name] for name in rollouts}
        chosen = [query["run"]] if query.get("run") in names else [*names]
        turns = zip_longest(*(rollouts[name] for name in chosen))  # beside each other
        rows = search.first(row for row in chain.from_iterable(turns) if row is not None)
        kept = {key: value for key, value in query.items() if value and key != "open"}
        return report(
            [*names.values()],
            template="watch.html",
            live=True,
            notices=[*map(printable, notices)],
            rows=[
                {
                    "run": row["run"],
                    "step": row.get("step"),
                    "kind": row.get("kind"),
                    "prompt": shown(row.get("prompt", ""), CHARACTERS),
                    "images": thumbnails(row),
                    "output": shown(row.get("output", ""), CHARACTERS),
                    "measures": measures(row),
                    "link": "?" + urlencode({**kept, "open": row["key"]}) + "#response" if "tokens" in row else "",
                }
                for row in rows
            ],
            names=list(names),
            query={"run": "", "text": "", "kind": "", "by": "reward", "least": "", "most": "", "order": "", **kept},
            numbers=sorted({name for row in rows for name in measures(row)} | {"reward", query.get("by") or "reward"}),
            response=self._response(query["open"], names) if query.get("open") else None,
            back="?" + urlencode(kept) + "#rollouts",
            **live,
        )

    def _response(self, key: str, names: Mapping[str, Record]) -> dict[str, Any]:
        """Return the response that is opened, token by token.

        Raises:
            ConfigError: it is no longer in the files.
        """
        for row in (row for name, run in names.items() for row in newest_of(name, run)):
            if row["key"] == key:
                self.opened[key] = (row["run"], row)
        if key not in self.opened:
            raise ConfigError(
                f"the response {key!r} is no longer recorded: a newer collection has taken its place; go back to the "
                "rollouts and open another one"
            )
        for old in list(self.opened)[:-KEPT]:
            del self.opened[old]
        run, row = self.opened[key]
        return {
            "run": run,
            "step": row.get("step"),
            "prompt": shown(row.get("prompt", ""), 20_000),
            "images": thumbnails(row),
            "measures": measures(row),
            **tokens_of(row),
        }


def newest_of(name: str, run: Record) -> Iterator[Rollout]:
    """Yield the rollouts of the newest collection of a run, each with the name of the run and a key."""
    for at, row in enumerate(run.collected()):
        yield {**row, "run": name, "key": f"{name}:{row.get('step')}:{at}"}


def rollouts_of(name: str, run: Record) -> Iterator[Rollout]:
    """Yield the rollouts of a run, those of the newest collection first, then the others from the last one on."""
    newest = list(newest_of(name, run))
    yield from newest
    step = newest[0].get("step") if newest else None
    others = [
        line
        for line in lines_of(run.path / "samples.jsonl")
        if line.get("kind") != "rollout" or line.get("step") != step
    ]
    yield from ({**line, "run": name, "key": ""} for line in reversed(others))


def tokens_of(row: Rollout) -> dict[str, Any]:
    """Return the tokens of a response, with a colour for each of what is known of them.

    The colour of a log-probability is stronger the lower it is, down to −5. Advantages and KL have one colour where
    they are positive and another where they are negative, as strong as their part of the largest in the response.
    """
    tokens = row["tokens"]
    known = {name: said for name, said in MEASURES.items() if name in tokens}
    largest = {name: max(map(abs, filter(math.isfinite, tokens[name])), default=0) or 1 for name in known}
    pieces = []
    for at, text in enumerate(tokens["text"]):
        values = {name: float(tokens[name][at]) for name in known}
        shares = {
            name: min(-value / 5, 1.0) if name == "logprob" else value / largest[name] for name, value in values.items()
        }
        colours = ";".join(f"--{name}:{colour(share, name)}" for name, share in shares.items())
        told = ", ".join(f"{known[name]} {value:.4g}" for name, value in values.items())
        pieces.append({"text": printable_token(text), "style": Markup(colours), "told": told, "values": values})
    return {"tokens": pieces, "known": known}


def colour(share: float, name: str) -> str:
    """Return the colour of a value by its part of the largest one: that of the paper at 0 and where it is unknown."""
    if not math.isfinite(share):
        return "transparent"
    hue = "--less" if name == "logprob" or share < 0 else "--more"
    return f"color-mix(in srgb,var({hue}) {min(abs(share), 1) * MOST:.0%},transparent)"


def printable_token(text: Any) -> str:
    """Return a token as text that shows line breaks and control characters."""
    return "\n".join(map(printable, str(text).replace("\n", "⏎\n").split("\n")))


# ---------------------------------------------------------------------------------------------------------- the server


class _Handler(BaseHTTPRequestHandler):
    """Answers GET for the page and its script."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "trainkit", ""

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        address = urlsplit(self.path)
        if host not in LOOPBACK:
            self._answer(HTTPStatus.FORBIDDEN, b"this server answers requests to localhost alone", "text/plain")
        elif address.path == "/watch.js":
            self._answer(HTTPStatus.OK, SCRIPT, "text/javascript")
        elif address.path != "/":
            self._answer(HTTPStatus.NOT_FOUND, b"there is one page, /", "text/plain")
        else:
            tag = f'"{self.server.watch.state()}"'
            if self.headers.get("If-None-Match") == tag:
                self._answer(HTTPStatus.NOT_MODIFIED, b"", "text/html", tag)
                return
            page = self.server.watch.page(dict(parse_qsl(address.query)))
            self._answer(HTTPStatus.OK, page.encode(errors="replace"), "text/html", tag)

    def _answer(self, status: HTTPStatus, body: bytes, kind: str, tag: str = "") -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-cache",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            **({"ETag": tag} if tag else {}),
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        log.debug(format, *arguments)


class Server(ThreadingHTTPServer):
    """Serves the page of runs on loopback. A notebook shows it, and `close` ends it.

    Args:
        places: directories of runs, or directories that hold runs.
        port: the port; 0 for a free one.

    Raises:
        ConfigError: the port cannot be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, places: Sequence[Path], port: int = 0) -> None:
        self.watch = Watch(places)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"port {port} cannot be used ({why}); give another one, or 0 for a free one") from error

    @property
    def port(self) -> int:
        """The port."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{ADDRESS}:{self.port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Do nothing: the browser has gone away before it was answered."""

    def start(self) -> Server:
        """Serve from a thread, and return the server itself."""
        Thread(target=self.serve_forever, name="trainkit-watch", daemon=True).start()
        return self

    def close(self) -> None:
        """End the thread, and give the port back."""
        self.shutdown()
        self.server_close()

    def _repr_html_(self) -> str:
        """Return the page in a frame, for notebooks."""
        form = '<p><a href="{0}" target="_blank">{0}</a></p><iframe src="{0}" width="100%" height="700"></iframe>'
        return Markup(form).format(self.url)
