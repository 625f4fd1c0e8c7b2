"""Access to the Prefect server that Rheostat starts: clients need its password, and foreign pages are refused."""

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from prefect import flow
from prefect._internal.analytics.ci_detection import CI_ENV_VARS
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_PROFILES_PATH,
    PREFECT_SERVER_API_AUTH_STRING,
    load_profiles,
    temporary_settings,
)
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from rheostat.flows.cli.passwords import PROFILE, configured_password, print_password, read_password, store_password
from rheostat.flows.cli.prefect_api import run_flow
from rheostat.infra.errors import ApiFailed
from tests.support.jobs import PASSWORD, RHEOSTAT, ROOT, answers, copy_prefect_database, kill, wait_for
from tests.support.servers import reserved_port
from tests.support.terminal import on_terminal

SOCKETS = ("/events/in", "/events/out", "/logs/out")

EVIL = "http://evil.example"


def count_flows(api: str, *, auth: tuple[str, str] | None = PASSWORD, **headers: str) -> httpx.Response:
    """Request data that only authenticated clients may read."""
    return httpx.post(f"{api}/flows/count", json={}, auth=auth, headers=headers, timeout=30)


@contextmanager
def open_websocket(
    api: str, path: str, *, name: str | None = None, origin: str | None = None
) -> Iterator[ClientConnection]:
    """Open a websocket of the API, with another host name if one is passed."""
    place = urlsplit(api)
    to = socket.create_connection((place.hostname, place.port), timeout=30)
    url = f"ws://{name or place.netloc}/api{path}"
    with connect(url, sock=to, origin=origin, subprotocols=["prefect"], proxy=None, open_timeout=None) as websocket:
        yield websocket


def authenticate(websocket: ClientConnection, password: str | None) -> str:
    """Send a password as Prefect's clients do, and return the server's answer."""
    websocket.send(json.dumps({"type": "auth", "token": password}))
    return str(json.loads(websocket.recv())["type"])


@pytest.mark.parametrize("auth", [None, ("tests", "wrong"), ("", "")])
def test_without_the_password_only_the_health_check_answers(prefect_api, auth):
    assert count_flows(prefect_api, auth=auth).status_code == 401
    for path in ("/admin/version", "/openapi.json", "/docs"):
        assert httpx.get(f"{prefect_api}{path}", auth=auth, timeout=30).status_code == 401
    assert httpx.get(f"{prefect_api}/health", timeout=30).status_code == 200


def test_the_page_is_served_to_everyone_and_asks_for_the_password(prefect_api):
    home = prefect_api.removesuffix("/api")
    page = httpx.get(f"{home}/", headers={"Accept": "text/html"}, follow_redirects=True, timeout=30)
    assert (page.status_code, "<html" in page.text.lower()) == (200, True)
    settings = httpx.get(f"{home}/ui-settings", timeout=30).json()
    assert (settings["auth"], settings["api_url"]) == ("BASIC", "/api")
    assert httpx.get(f"{prefect_api}/admin/version", auth=PASSWORD, timeout=30).status_code == 200  # what it asks first


@pytest.mark.parametrize("name", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_a_request_with_a_foreign_host_name_is_refused(prefect_api, name):
    name = name.format(port=urlsplit(prefect_api).port)
    assert count_flows(prefect_api, Host=name).status_code == 400
    assert httpx.get(prefect_api.removesuffix("/api"), headers={"Host": name}, timeout=30).status_code == 400


@pytest.mark.parametrize("name", ["127.0.0.1:{port}", "localhost:{port}", "localhost:5000", "[::1]:{port}"])
def test_every_name_of_loopback_is_served(prefect_api, name):
    name = name.format(port=urlsplit(prefect_api).port)
    assert count_flows(prefect_api, Host=name, Origin=f"http://{name}").status_code == 200


@pytest.mark.parametrize("origin", [EVIL, "null", "http://127.0.0.1:1", "https://localhost"])
def test_a_page_of_another_origin_is_refused_even_with_the_password(prefect_api, origin):
    for answer in (
        count_flows(prefect_api, Origin=origin),
        httpx.get(f"{prefect_api}/health", headers={"Origin": origin}, timeout=30),
        httpx.options(
            f"{prefect_api}/flows/count",
            headers={"Origin": origin, "Access-Control-Request-Method": "POST"},
            timeout=30,
        ),
    ):
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("path", SOCKETS)
def test_websockets_check_host_origin_and_password(prefect_api, path):
    with pytest.raises(InvalidStatus, match="403"), open_websocket(prefect_api, path, origin=EVIL):
        pass
    with pytest.raises(InvalidStatus, match="400"), open_websocket(prefect_api, path, name="evil.example"):
        pass
    for wrong in (None, "tests:wrong"):
        with open_websocket(prefect_api, path) as websocket, pytest.raises(ConnectionClosedError, match="1008"):
            authenticate(websocket, wrong)
    with open_websocket(prefect_api, path, origin=prefect_api.removesuffix("/api")) as websocket:
        assert authenticate(websocket, ":".join(PASSWORD)) == "auth_success"


@pytest.fixture
def home(prefect_api, together, tmp_path) -> Path:
    """Prefect home with a prepared database."""
    copy_prefect_database(together / "prefect", tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def environment(home: Path, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**kept, "PREFECT_HOME": str(home), "DO_NOT_TRACK": "1", **variables}


ASK = """
from rheostat.flows.cli.prefect_api import prefect_api
with prefect_api() as url:
    from prefect.client.orchestration import get_client
    with get_client(sync_client=True) as client:
        print(len(client.read_work_pools()), url)
"""
"""Program that uses Prefect as every `rheostat` command with Prefect does."""


@pytest.mark.thorough
def test_on_a_fresh_account_no_command_has_prefect_print_its_notice_of_usage_statistics(tmp_path, monkeypatch):
    for name in ("DO_NOT_TRACK", *CI_ENV_VARS):
        monkeypatch.delenv(name, raising=False)
    program = "from rheostat.flows.cli.app import main; main(['--version']); import prefect"
    variables = {"PREFECT_HOME": str(tmp_path / "prefect"), "HOME": str(tmp_path)}
    code, sent = on_terminal([sys.executable, "-c", program], env=variables)
    assert (code, len(sent.splitlines())) == (0, 1), sent
    assert sent.startswith("rheostat ")


@pytest.mark.system
def test_the_password_of_a_server_is_found_by_the_commands_of_its_user_and_never_printed(home, port, tmp_path):
    api, output = f"http://127.0.0.1:{port}/api", tmp_path / "output"
    origins = {"PREFECT_SERVER_CORS_ALLOWED_ORIGINS": "https://prefect.example"}
    command = [RHEOSTAT, "server", "--port", str(port)]
    with output.open("wb") as file:
        serving = subprocess.Popen(command, env=environment(home, **origins), stdout=file, stderr=file)
    try:
        assert wait_for(lambda: answers(f"{api}/health"))
        assert output.read_text().startswith(f"Prefect UI at http://127.0.0.1:{port} (stop with Ctrl-C)\n")
        profiles = home / "profiles.toml"
        [secret] = re.findall('PREFECT_API_AUTH_STRING = "rheostat:(.+)"', profiles.read_text())
        assert (len(secret), profiles.stat().st_mode & 0o777) == (32, 0o600)

        assert count_flows(api, auth=None).status_code == 401
        assert count_flows(api, auth=("rheostat", secret)).status_code == 200
        for path in SOCKETS:
            with open_websocket(api, path) as websocket:
                assert authenticate(websocket, f"rheostat:{secret}") == "auth_success"
            with open_websocket(api, path) as websocket, pytest.raises(ConnectionClosedError, match="1008"):
                authenticate(websocket, None)
        behind_a_proxy = {"Host": "prefect.example", "Origin": "https://prefect.example"}
        assert count_flows(api, auth=("rheostat", secret), **behind_a_proxy).status_code == 200
        assert count_flows(api, auth=("rheostat", secret), Origin=EVIL).status_code == 403

        assert asked([sys.executable, "-c", ASK], environment(home, PREFECT_API_URL=api)).endswith(f" {api}\n")
        prefect = [str(Path(sys.executable).with_name("prefect")), "work-pool", "create", "--type", "process", "found"]
        assert "Created work pool 'found'" in asked(prefect, environment(home, PREFECT_PROFILE=PROFILE))
        serving.send_signal(signal.SIGINT)
        assert serving.wait() == 0
        assert secret not in output.read_text()
    finally:
        kill(serving)


def asked(command: list[str], variables: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.system
def test_the_server_of_a_job_has_a_password_that_only_the_two_processes_know(home):
    holding = f"{ASK}\n    input()"
    command = [sys.executable, "-c", holding]
    job = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(home),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        url = job.stdout.readline().split()[-1]
        [server] = psutil.Process(job.pid).children()
        password = server.environ()["PREFECT_SERVER_API_AUTH_STRING"]
        assert count_flows(url, auth=None).status_code == 401
        name, _, secret = password.partition(":")
        assert (count_flows(url, auth=(name, secret)).status_code, len(secret)) == (200, 32)
        assert secret not in " ".join(server.cmdline())
        assert secret not in str(psutil.Process(job.pid).environ())  # nor, then, in those of its workers
        told = "".join(job.communicate("\n"))
        assert (job.returncode, secret in told) == (0, False)
        assert not [path for path in home.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    finally:
        kill(job)


def test_the_password_of_a_job_is_shown_at_a_terminal_and_in_no_log(capsys, caplog):
    caplog.set_level(logging.INFO)
    password = f"rheostat:{'secret'}"  # in no line of a traceback
    print_password(password)
    assert "set PREFECT_API_AUTH_STRING" in caplog.text
    assert password not in caplog.text + "".join(capsys.readouterr())
    master, slave = os.openpty()
    with os.fdopen(master) as shown, os.fdopen(slave, "w") as terminal, contextlib.redirect_stderr(terminal):
        print_password(password)
        terminal.flush()
        assert password in shown.readline()
    assert password not in caplog.text


def test_a_job_that_the_server_refuses_names_the_setting_for_the_password(prefect_api):
    @flow
    async def pipeline():
        pass

    api = {PREFECT_API_URL: prefect_api, PREFECT_API_AUTH_STRING: "tests:wrong"}
    with temporary_settings(api), pytest.raises(ApiFailed, match=r"/api requires a password\. Set PREFECT_API_AUTH"):
        run_flow(pipeline())


@pytest.mark.slow
def test_a_password_of_the_user_replaces_the_generated_password(home):
    own = {"PREFECT_API_AUTH_STRING": "me:mine"}
    status = "httpx.get(url + '/admin/version', auth={}).status_code"
    both = f"import httpx; print({status.format(None)}, {status.format(('me', 'mine'))})"
    assert asked([sys.executable, "-c", f"{ASK}\n    {both}"], environment(home, **own)).endswith("401 200\n")


def test_the_profile_keeps_one_password_for_the_server_started_last_and_for_no_other(tmp_path):
    path = tmp_path / "profiles.toml"
    path.write_text('active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "https://api.example/api"\n')
    path.chmod(0o644)
    with temporary_settings({PREFECT_PROFILES_PATH: path}):
        password = store_password(4200)
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_password("http://localhost:4200/api") == password == read_password("http://127.0.0.1:4200/api")
        for elsewhere in ("http://127.0.0.1:4201/api", "http://10.0.0.1:4200/api", "https://api.example/api"):
            assert read_password(elsewhere) is None
        assert store_password(4300) == password
        assert read_password("http://127.0.0.1:4300/api") == password
        profiles = load_profiles()
        assert profiles.active_name == "mine"
        assert PREFECT_API_AUTH_STRING not in profiles["mine"].settings
        with temporary_settings({PREFECT_API_AUTH_STRING: password}):  # where the profile is the active one
            assert configured_password() is None


def test_a_password_of_the_user_for_the_server_precedes_that_for_clients(tmp_path):
    with temporary_settings({PREFECT_PROFILES_PATH: tmp_path / "profiles.toml"}):
        assert configured_password() is None
        with temporary_settings({PREFECT_API_AUTH_STRING: "my:client"}):
            assert configured_password() == "my:client"
            with temporary_settings({PREFECT_SERVER_API_AUTH_STRING: "my:server"}):
                assert configured_password() == "my:server"
