"""The page of a run that goes on: served to this machine alone, new where the run's files are."""

import http.client
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from patience import PATIENCE_S
from run_dirs import add_step, make_run

from nemo_rl_offload.cli import command_line
from nemo_rl_offload.observability.html_report import RUN_FILES, run_page
from nemo_rl_offload.observability.page_server import PageServer


@contextmanager
def serving(run_dir: Path, port: int = 0) -> Iterator[PageServer]:
    files = [run_dir / name for name in RUN_FILES]
    with PageServer(port, lambda script: run_page(run_dir, script=script), files) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_a_new_checkpoint_makes_the_page_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "checkpoints").mkdir()
    tags: list[str] = []

    def serve(server: PageServer) -> None:
        tags.append(server.tag())
        (run_dir / "checkpoints" / "step_1").mkdir()
        tags.append(server.tag())

    monkeypatch.setattr(PageServer, "serve_forever", serve)
    assert command_line.main(["report", str(run_dir), "--serve"]) == 0
    assert len({*tags}) == 2


def test_a_page_with_what_is_no_text_is_served() -> None:
    with PageServer(0, lambda _: "bad \udcff", []) as server:
        threading.Thread(target=server.handle_request).start()
        assert ask(server)[:2] == (200, "bad \\udcff")


def ask(server: PageServer, path: str = "", **headers: str) -> tuple[int, str, str]:
    """Status, text and tag."""
    request = urllib.request.Request(
        server.address + path, headers={k.replace("_", "-"): v for k, v in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode(), answer.headers["ETag"]
    except urllib.error.HTTPError as error:
        return error.code, "", ""


def test_a_page_is_new_where_the_files_are(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    with serving(run_dir) as server:
        status, text, tag = ask(server)
        assert status == 200
        assert "not finished" in text
        assert ask(server, If_None_Match=tag)[0] == 304
        add_step(run_dir, 4)
        status, later, other = ask(server, If_None_Match=tag)
        assert status == 200
        assert other != tag
        assert later != text
        (run_dir / "summary.part").write_text("{}")
        assert ask(server, If_None_Match=other)[0] == 304, "no file of the run's"
        (run_dir / "changes.jsonl").write_text('{"step": 4, "changes": {}}\n')
        assert ask(server, If_None_Match=other)[0] == 200


def test_a_run_that_has_logged_nothing_is_said_and_shown_later(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", 0)
    with serving(run_dir) as server:
        assert "the run has logged nothing yet" in ask(server)[1]
        add_step(run_dir, 1)
        assert "Curves" in ask(server)[1]


def test_it_answers_this_machine_alone(tmp_path: Path) -> None:
    with serving(make_run(tmp_path / "run")) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert ask(server, Host=f"localhost:{server.server_port}")[0] == 200
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1.evil.example", ""):
            assert ask(server, Host=host)[0] == 403, "a name that another site lets point here"
        for path in ("config.yaml", "../config.yaml", "%2e%2e/config.yaml", "x?/", "/config.yaml"):
            assert ask(server, path)[0] == 404
        with urllib.request.urlopen(server.address, timeout=PATIENCE_S) as answer:
            policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "connect-src 'self'" in policy


def test_heads_and_queries_are_answered(tmp_path: Path) -> None:
    with serving(make_run(tmp_path / "run")) as server:
        status, text, tag = ask(server, "?a=1")
        assert (status, text, tag) == ask(server)
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE_S)
        for host, wanted in (("localhost", 200), ("evil.example", 403)):
            connection.request("HEAD", "/?a=1", headers={"Host": host})
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (wanted, b"")
            if wanted == 200:
                assert int(answer.headers["Content-Length"]) == len(text.encode())
                assert answer.headers["ETag"] == tag
            connection.close()


def test_the_command_serves_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_server: PageServer) -> None:
        raise KeyboardInterrupt

    run_dir = make_run(tmp_path / "run")
    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    assert command_line.main(["report", str(run_dir), "--serve"]) == 0
    assert "Serving http://127.0.0.1:" in capsys.readouterr().out


def test_mistakes_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = str(make_run(tmp_path / "run"))
    with serving(tmp_path / "run") as server:
        port = str(server.server_port)
        for arguments, said in (
            ([run_dir, "--port", port], "--port .*: needs --serve"),
            ([run_dir, "--serve", "--port", "70000"], "from 0 to 65535"),
            ([run_dir, "--serve", "--port", port], f"--port {port}: Address already in use"),
            ([run_dir, "--serve", "--out", "x.html"], "--serve writes no file"),
            ([run_dir, str(tmp_path / "none"), "--serve"], "none: is no folder"),
        ):
            assert command_line.main(["report", *arguments]) == 2
            error = capsys.readouterr().err
            assert re.search(said, error), error
