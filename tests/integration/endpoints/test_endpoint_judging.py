"""A judge worker that calls a real endpoint: from a rollout shard to verdicts, by HTTP and by TLS."""

import json
import ssl
import subprocess
import sys
from dataclasses import replace

import pyarrow as pa
import pytest

from rheostat.infra.errors import BadInput, EndpointDown
from rheostat.infra.pools.host import Host, Raised
from rheostat.infra.store.shards import read_shard, write_shard
from rheostat.infra.store.storage import open_store
from rheostat.models.config.judges import JudgeReward
from rheostat.models.config.verdicts import ChoiceVerdict
from rheostat.models.records.schemas import PROMPT_SCHEMA
from rheostat.models.records.work import JudgeWork
from rheostat.models.workers.judge import JudgeWorker
from tests.support.chat_server import Reply, chat_server, reply_with
from tests.support.endpoint_judges import CANARY, endpoint_at, judge_at, questions, write_rollouts

TEMPLATE = "{prompt}|{completion}|{answer}"


def is_right(asked, before):
    """Judge the completion from the text of the question."""
    _, completion, answer = asked.text.split("|")
    return reply_with("yes" if completion == answer else "no")


class Bench:
    """A judge worker that queries an endpoint, and its store."""

    def __init__(self, root, url, **changes):
        reward = JudgeReward(
            name="right",
            model=endpoint_at(url, **changes),
            template=TEMPLATE,
            verdict=ChoiceVerdict(constrained=False),
            votes=2,
            retries=1,
        )
        self.options = {"store_uri": str(root), "run": "run", "term": "right", "reward": reward, "threads": 1}
        self.store = open_store(str(root / "run"))
        self.worker = JudgeWorker(**self.options)

    def judge(self, *completions):
        return self.worker.judge(self.work(*completions))

    def work(self, *completions):
        return JudgeWork(iteration=1, rollouts=write_rollouts(self.store, *completions), model=None, seed=3)

    def rows(self, outcome):
        return read_shard(self.store, outcome.shards[0]).to_pylist()


def test_verdicts_from_an_endpoint_become_rewards(tmp_path):
    with chat_server(is_right) as server:
        bench = Bench(tmp_path, server.url)
        assert [row["value"] for row in bench.rows(bench.judge("1", "7", "3"))] == [1, 1, 0, 0, 1, 1]
    seeds = [asked.body["seed"] for asked in server.asked]
    assert len(set(seeds)) == 6


def test_a_judge_reads_the_messages_of_a_chat_instead_of_the_text_that_the_policy_reads(tmp_path):
    chat = [{"role": role, "content": "1 < 2?", "name": None} for role in ("system", "user")]
    row = {"prompt_id": "a", "text": "<|user|>", "tokens": [1], "images": [], "answer": "", "columns": "{}"}
    table = pa.Table.from_pylist([{**row, "messages": each} for each in (chat, None, chat)], PROMPT_SCHEMA)
    with chat_server(is_right) as server:
        bench = Bench(tmp_path, server.url)
        prompts = write_shard(bench.store, table, kind="prompts", metadata={})
        bench.worker.judge(replace(bench.work("1", "7", "3"), prompts=prompts))
    marked = "\n".join(f'<message role="{role}">\n1 &lt; 2?\n</message>' for role in ("system", "user"))
    assert [asked.text.partition("|")[0] == marked for asked in server.asked].count(True) == 4


def test_the_same_work_gives_the_same_shard_despite_failures_of_the_endpoint(tmp_path):
    def shaky(asked, before):
        return Reply(reset=True) if before % 3 == 0 and asked.text[0] in "02" else is_right(asked, before)

    with chat_server(is_right) as server:
        steady = Bench(tmp_path / "steady", server.url).judge("1", "7", "3")
    with chat_server(shaky) as server:
        shaken = Bench(tmp_path / "shaky", server.url).judge("1", "7", "3")
    assert len(server.asked) > 6
    assert (steady.shards, steady.metrics) == (shaken.shards, shaken.metrics)


def test_a_garbage_answer_is_requested_again_and_then_invalid(tmp_path):
    def garbage(asked, before):
        return Reply(body=b"<html>") if asked.text.startswith("1") else is_right(asked, before)

    with chat_server(garbage) as server:
        bench = Bench(tmp_path, server.url)
        outcome = bench.judge("1", "7", "3")
    bad = [(row["vote"], row["attempt"], row["value"]) for row in bench.rows(outcome) if row["prompt_row"] == 1]
    assert bad == [(0, 0, None), (0, 1, None), (1, 0, None), (1, 1, None)]
    assert (outcome.metrics["answers"], outcome.metrics["invalid"]) == (6, 2)


def test_an_endpoint_that_is_down_is_a_named_error_and_no_verdicts_are_written(tmp_path):
    with chat_server(lambda asked, before: Reply(status=503)) as server:
        bench = Bench(tmp_path, server.url, retries=1)
        host, work = Host(), bench.work("1")
        host.construct("rheostat.models.workers.judge:JudgeWorker", bench.options)
        raised = host.run("judge", (work,))
    assert isinstance(raised, Raised)
    assert isinstance(raised.error, EndpointDown)
    kinds = [read.suffix for read in (tmp_path / "run" / "shards").rglob("*") if read.is_file()]
    assert len(kinds) == 1  # the rollouts alone


def test_no_shard_contains_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", CANARY)
    repeats = Reply(status=400, body=json.dumps({"error": f"bad key {CANARY}"}).encode())
    with chat_server(lambda asked, before: repeats) as server:
        outcome = Bench(tmp_path, server.url, api_key_variable="JUDGE_KEY").judge("1")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert outcome.metrics["invalid"] == 2
    assert len(files) >= 2
    assert not any(CANARY.encode() in path.read_bytes() for path in files)


# ---- the connection goes where it was checked to go


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Certificate for the name `localhost` and for no address."""
    root = tmp_path_factory.mktemp("tls")
    certificate, key = root / "cert.pem", root / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def test_a_certificate_is_checked_against_the_host_name_although_the_address_is_connected(certificate, monkeypatch):
    file, key = certificate
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file, key)
    with chat_server(lambda asked, before: reply_with("fine"), tls=context) as server:
        port = server.url.split(":")[2]
        named = judge_at(f"https://localhost:{port}", allowed_hosts=("localhost",), retries=1)
        assert [answer.text for answer in named.answer(questions(2))] == ["fine", "fine"]
        by_address = judge_at(f"https://127.0.0.1:{port}", retries=0)
        with pytest.raises(EndpointDown, match="certificate"):
            by_address.answer(questions(1))
    assert server.asked[0].headers["Host"] == f"localhost:{port.removesuffix('/v1')}"


LOOKUPS: list[object] = []


def _note_lookup(event, arguments):
    if event == "socket.getaddrinfo":
        LOOKUPS.append(arguments[0])


def test_a_host_name_is_resolved_once_and_the_connection_uses_the_address():
    sys.addaudithook(_note_lookup)
    with chat_server(lambda asked, before: Reply(reset=True) if before == 0 else reply_with("fine")) as server:
        judge = judge_at(server.url.replace("127.0.0.1", "localhost"), allowed_hosts=("localhost",))
        LOOKUPS.clear()
        judge.answer(questions(10))
        seen = list(LOOKUPS)
    assert seen.count("localhost") == 1
    assert set(seen) - {"localhost"} <= {"127.0.0.1", b"127.0.0.1", "::1", b"::1"}


def test_a_host_name_that_resolves_to_a_private_address_is_refused_before_anything_is_sent():
    with chat_server(lambda asked, before: reply_with("fine")) as server:
        port = server.url.split(":")[2]
        judge = judge_at(f"https://localhost:{port}", allowed_hosts=("localhost",), allow_private=False)
        with pytest.raises(BadInput, match=r"localhost resolves to (127\.0\.0\.1|::1), a private, loopback"):
            judge.answer(questions(3))
    assert server.asked == []
    assert judge.progress <= 3, "refused, not tried again"


def test_a_host_name_that_does_not_resolve_is_retried_and_then_counts_as_down():
    judge = judge_at("https://nowhere.invalid/v1", allowed_hosts=("nowhere.invalid",), retries=1)
    with pytest.raises(EndpointDown, match=r"in 2 attempts.* nowhere\.invalid cannot be resolved"):
        judge.answer(questions(2))
