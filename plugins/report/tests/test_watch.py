"""The page that is served while runs go on."""

from __future__ import annotations

import json
import math
import re
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tables import table
from trainkit.cli import app
from trainkit.errors import ConfigError, DataError
from trainkit_report.groups import runs_at
from trainkit_report.watch import ROWS, Search, Server, Watch, colour
from written import EVIL, Page, write_run


def newest(run: Path, step: int = 20, count: int = 3, **further: Any) -> None:
    """Write what a run writes of its newest collection."""
    tokens = {"text": ["a", " <b>", "\n", "<eos>"], "logprob": [-0.1, -7.0, -1.0, -0.5]}
    tokens |= {"advantage": [1.0, 0.5, -2.0, 0.0], "kl": [0.0, 0.2, -0.1, math.nan]}
    rows = [
        {"step": step, "kind": "rollout", "prompt": f"q{at} {EVIL}", "output": "a <b>\n", "reward": at / 4,
         "form": 1.0, "tokens": tokens, **further}
        for at in range(count)
    ]  # fmt: skip
    (run / "newest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextmanager
def serving(*places: Path) -> Iterator[Server]:
    server = Server(places).start()
    try:
        yield server
    finally:
        server.close()


def asked(server: Server, target: str = "/", **headers: str) -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", target, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body, answer.headers.get("ETag", "")


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", Page(page[page.index("<body>") :]).text)


def test_the_page_has_the_report_and_the_newest_rollouts_with_their_rewards_by_part(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    newest(run)
    with serving(run) as server:
        status, page, _ = asked(server)
    assert status == 200
    text = text_of(page)
    for part in ("Rollouts", "Curves", "Evaluations", "Samples", "Health", "Timing", "Configuration"):
        assert f" {part} " in text
    assert "form 1" in text
    assert "reward 0.5" in text
    assert "<script>alert(1)" in text  # shown as text
    read = Page(page)
    assert read.tags.count("script") == 1
    assert set(read.addresses) <= {
        "/watch.js",
        *(each for each in read.addresses if each.startswith(("#", "?", "/#", "data:,"))),
    }
    assert page.count('aria-label="Rollouts') == 1  # not those of the report, too


def test_a_response_is_shown_token_by_token_and_stays_when_a_newer_collection_takes_its_place(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    newest(run)
    watch = Watch([run])
    page = watch.page({"open": "run:20:1"})
    tokens = re.findall(r'<span class="t" style="([^"]*)" title="([^"]*)">([^<]*)</span>', page)
    assert [text for *_, text in tokens] == ["a", " &lt;b&gt;", "⏎\n", "&lt;eos&gt;"]
    assert tokens[1][1] == "log-probability -7, advantage 0.5, KL from the reference 0.2"
    assert "--logprob:color-mix(in srgb,var(--less) 60%,transparent)" in tokens[1][0]  # the strongest, from −5 on
    assert "--advantage:color-mix(in srgb,var(--more) 15%,transparent)" in tokens[1][0]  # a quarter of the largest
    assert "--kl:transparent" in tokens[3][0]
    assert "Without JavaScript" in page
    assert 'http-equiv="refresh"' not in page  # it would take the response away
    newest(run, step=40)
    assert "step 20" in text_of(watch.page({"open": "run:20:1"}))
    assert "a newer collection has taken its place" in text_of(Watch([run]).page({"open": "run:20:1"}))


def test_colours_are_those_of_sign_and_size() -> None:
    assert colour(0.0, "kl") == "color-mix(in srgb,var(--more) 0%,transparent)"
    assert colour(-1.0, "kl") == "color-mix(in srgb,var(--less) 60%,transparent)"
    assert colour(0.5, "logprob") == "color-mix(in srgb,var(--less) 30%,transparent)"
    assert colour(math.inf, "kl") == "transparent"


@table(
    "query, outputs",
    [
        ({}, ["x", "Yes", "no"]),
        ({"text": "YES"}, ["Yes"]),
        ({"text": "p2"}, ["no"]),
        ({"kind": "evaluation"}, ["no"]),
        ({"least": "1"}, ["Yes", "no"]),
        ({"by": "form", "most": "0"}, ["x"]),
        ({"order": "highest"}, ["no", "Yes"]),
        ({"order": "lowest"}, ["Yes", "no"]),
    ],
)
def test_rollouts_are_searched_filtered_and_sorted(query: dict[str, str], outputs: list[str]) -> None:
    rows = [
        {"kind": "rollout", "prompt": "p0", "output": "x", "form": 0, "reward": None},
        {"kind": "rollout", "prompt": "p1", "output": "Yes", "form": 1, "reward": 1.0},
        {"kind": "evaluation", "prompt": "p2", "output": "no", "reward": 2.0},
    ]
    assert [row["output"] for row in Search.of(query).first(iter(rows))] == outputs


def test_runs_are_beside_each_other_and_one_of_them_can_be_chosen(tmp_path: Path) -> None:
    for name, lr in (("a", 1e-3), ("b", 0.1)):
        newest(write_run(tmp_path / name, lr=lr), count=ROWS)
    page = Watch([tmp_path]).page({})
    shown = re.findall(r"<tr><td>(\w)</td><td class=\"n\">20", page)
    assert shown == ["a", "b"] * (ROWS // 2)
    assert set(re.findall(r"<tr><td>(\w)</td><td class=\"n\">20", Watch([tmp_path]).page({"run": "b"}))) == {"b"}


def test_a_browser_is_told_whether_anything_has_changed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with serving(tmp_path) as server:
        _, _, tag = asked(server)
        assert asked(server, "/", **{"If-None-Match": tag})[:2] == (304, "")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 21, "reward/mean": 9.0}\n')
        status, page, now = asked(server, "/", **{"If-None-Match": tag})
    assert status == 200
    assert now != tag
    assert "21 of 20" in text_of(page)


def foreign(run: Path) -> None:
    (run / "config.yaml").write_text("learning_rate: 3\n")


def of_another_version(run: Path) -> None:
    newest(run, tokens={"ids": [1, 2]}, reward={"total": 1})
    (run / "starts.jsonl").write_text('{"time": 3, "makers": {"a": 1}}\n')


def half_written(run: Path) -> None:
    newest(run)
    for name in ("metrics.jsonl", "samples.jsonl", "newest.jsonl", "health.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 21, "rew')


@table(
    "make, query, says",
    [
        (foreign, {}, "names no method"),
        (of_another_version, {}, "has a start without a step; another version made the run"),
        (half_written, {}, "Curves"),
        (lambda run: (run / "metrics.jsonl").write_text("nonsense\n"), {}, "metrics.jsonl, line 1: not a JSON object"),
        (lambda run: (run / "metrics.jsonl").unlink(), {}, "no metrics have been recorded"),
        (lambda run: (run / "config.yaml").unlink(), {}, "is no run and holds none"),
        (lambda run: None, {"open": "run:1:1"}, "the response 'run:1:1' is no longer recorded"),
        (lambda run: None, {"open": EVIL, "run": EVIL, "by": EVIL, "order": EVIL}, "is no longer recorded"),
    ],
)
def test_what_cannot_be_shown_is_a_page_with_a_sentence(
    make: Any, query: dict[str, str], says: str, tmp_path: Path
) -> None:
    make(write_run(tmp_path / "run"))
    page = Watch([tmp_path / "run"]).page(query)
    assert says in text_of(page)
    assert "Traceback" not in page
    assert Page(page).tags.count("script") == 1


def test_only_this_machine_is_answered_and_only_with_the_page(tmp_path: Path) -> None:
    with serving(write_run(tmp_path / "run")) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert asked(server, "/", Host="evil.example:8765")[0] == 403  # a name that leads to this machine
        assert asked(server, "/", Host=f"localhost:{server.port}")[0] == 200
        assert asked(server, "/../../etc/passwd")[0] == 404
        assert asked(server, "/config.yaml")[0] == 404
        request = urllib.request.Request(server.url, data=b"x", method="POST")
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request)


def test_a_port_in_use_is_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["watch", str(tmp_path), "--port", str(port)])
    assert result.exit_code == 2
    assert f"port {port} cannot be used" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_that_cannot_be_read_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b", "c"):
        write_run(tmp_path / name)
    (tmp_path / "b/starts.jsonl").write_text('{"time": "now", "version": 9}\n')
    (tmp_path / "c/starts.jsonl").write_text("nonsense\nand more\n")
    assert [run.path.name for run in runs_at([tmp_path])] == ["a"]
    assert "starts.jsonl' has a start without a step; another version made the run" in caplog.text
    assert caplog.text.count("is left out: ") == 2
    with pytest.raises(DataError, match="another version made the run"):
        runs_at([tmp_path / "b"])


@pytest.mark.parametrize("file", ["metrics.jsonl", "samples.jsonl", "newest.jsonl"])
def test_a_file_with_a_broken_line_hides_no_other_run(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name)
    (tmp_path / "b" / file).write_text('{"step": 1}\n{"ste\n')
    page = Watch([tmp_path]).page({})
    assert "No page yet" not in page
    assert f"{file}, line 2: not a JSON object" in page + caplog.text, "on the page, or where the server was started"
    assert "Not shown" not in page, "this is said of curves"
    alone = Watch([tmp_path / "b"]).page({})
    assert f"{file}, line 2: not a JSON object" in alone


def test_a_bound_that_is_no_number_hides_nothing(tmp_path: Path) -> None:
    newest(write_run(tmp_path / "run"))
    page = Watch([tmp_path]).page({"text": "q1", "least": "x"})
    assert "Everything is shown: least is 'x'; give a number, or nothing" in text_of(page)
    assert 'name="text" value="q1"' in page
    assert "q0" in text_of(page)


def test_a_port_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="port 99999 cannot be used"):
        Server([tmp_path], port=99999)
