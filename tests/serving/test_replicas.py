"""Two replicas behind HAProxy with docs/haproxy.cfg: where requests go, and what clients see when a replica dies."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import IncompleteRead
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from openai import OpenAI

from tests.support.programs import ROOT
from tests.support.serving_cases import CHATS, STREAM, TGI, V1, Alone, Answer, Served, serving, serving_process, slow

HAPROXY = shutil.which("haproxy", path=os.environ.get("PATH", "") + ":/usr/sbin")
pytestmark = pytest.mark.skipif(HAPROXY is None, reason="needs HAProxy")
SESSION = "X-Session-Id"


@contextmanager
def proxied(folder: Path, *replicas: str) -> Iterator[Served]:
    """Run HAProxy over two replicas, which it names a and b."""
    text = (ROOT / "docs/haproxy.cfg").read_text()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as sock:
        places = ("bind :8080", "10.0.0.1:8000", "10.0.0.2:8000")
        urls = (url.removeprefix("http://") for url in replicas)
        for place, value in zip(places, (f"bind fd@{sock.fileno()}", *urls), strict=True):
            assert text.count(place) == 1
            text = text.replace(place, value)
        (folder / "haproxy.cfg").write_text(text)
        with (folder / "haproxy.log").open("wb") as log:
            command = [str(HAPROXY), "-db", "-f", str(folder / "haproxy.cfg")]
            process = subprocess.Popen(command, pass_fds=[sock.fileno()], stdout=log, stderr=log)
        try:
            yield Served(SimpleNamespace(url="http://{}:{}".format(*sock.getsockname())), None, [])  # type: ignore[arg-type]
        finally:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def second(chat_checkpoint: Path) -> Iterator[Served]:
    """A replica next to `served`."""
    with serving(chat_checkpoint) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(served: Served, second: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with proxied(tmp_path_factory.mktemp("proxy"), served.url, second.url) as server:
        yield server


def sessions(proxy: Served) -> dict[str, dict[str, str]]:
    """Return the header of a session for each replica."""
    found: dict[str, dict[str, str]] = {}
    for number in count():
        header = {SESSION: f"session {number}"}
        found.setdefault(proxy.get("/info", **header).headers["x-replica"], header)
        if len(found) == 2:
            return found
    raise AssertionError


def test_the_next_turn_of_a_conversation_is_fast(proxy: Served, served: Served, second: Served):
    """Conversations that begin with the same message of the system are spread over the replicas."""
    both = {"a": served, "b": second}
    reused = {name: server.metrics()["foretoken_reused_prompt_tokens_total"] for name, server in both.items()}
    system = {"role": "system", "content": "Be\tbrief."}
    texts = [[system, {"role": "user", "content": f'"{i}" é why?' * 5}] for i in range(5)]
    used: list[list[str]] = [[] for _ in texts]
    for turn in range(3):
        for text, names in zip(texts, used, strict=True):
            answer = proxy.ask(CHATS, {"messages": text, "max_tokens": 4, "temperature": 0})
            assert answer.status == 200, answer.body
            names.append(answer.headers["x-replica"])
            cached = answer.json["timings"]["cache_n"]
            assert turn == 0 or cached > answer.json["usage"]["prompt_tokens"] / 2
            reused[names[-1]] += cached
            text += [answer.json["choices"][0]["message"], {"role": "user", "content": "and?"}]
    assert all(len({*names}) == 1 for names in used) and {names[0] for names in used} == {"a", "b"}
    for name, server in both.items():
        assert server.metrics()["foretoken_reused_prompt_tokens_total"] == reused[name]


def test_a_replica_dies_under_load(served: Served, chat_checkpoint, alone: Alone, tmp_path):
    """Only requests that it runs fail, and OpenAI's client repeats its request: a seed has the same answer anywhere."""

    def ask(path: str, header: dict[str, str], n_new: int = 300) -> Answer:
        plain = {"speculate": False, "temperature": 0}
        of_tgi = {"inputs": "a b c", "parameters": {"max_new_tokens": n_new, **plain}}
        return proxy.ask(path, {"prompt": "a b c", "max_tokens": n_new, **plain} if path == V1 else of_tgi, header)

    def client(header: dict[str, str]) -> str:
        openai = OpenAI(base_url=f"{proxy.url}/v1", api_key="any")
        how = {"max_tokens": 300, "temperature": 0, "extra_headers": header}
        return openai.completions.create(model="m", prompt="a b c", **how).choices[0].text

    text = alone.text("a b c", 300)
    with (
        serving_process(tmp_path, chat_checkpoint, 1) as (job, dying),
        proxied(tmp_path, dying.url, served.url) as proxy,
        ThreadPoolExecutor(8) as pool,
        slow(served, 0.003),
    ):
        at = sessions(proxy)
        running = {
            name: [*(pool.submit(ask, path, header) for path in (STREAM, TGI, V1)), pool.submit(client, header)]
            for name, header in at.items()
        }
        served.until(lambda: len(served.answers) == 4, "requests")
        dying.until(lambda: dying.metrics()["tgi_batch_current_size"] == 4, "requests")
        os.kill(job.launcher.pid, signal.SIGKILL)
        later = [ask(path, header, 5) for path in (STREAM, TGI, V1) for header in at.values()]
        assert {(answer.status, answer.headers["x-replica"]) for answer in later} == {(200, "b")}
        stream, whole, completion, repeated = running["b"]
        assert stream.result().events[-1]["generated_text"] == whole.result().json["generated_text"] == text
        assert completion.result().json["choices"][0]["text"] == repeated.result() == text
        stream, whole, completion, repeated = running["a"]
        assert repeated.result() == text
        with pytest.raises(IncompleteRead):
            stream.result()
        for lost in (whole.result(), completion.result()):
            assert (lost.status, lost.headers["retry-after"]) == (503, "1")
        assert whole.result().json["error_type"] == completion.result().json["error"]["code"] == "unavailable"
        assert proxy.get("/health").status == 200 and proxy.get("/metrics").status == 404
