"""`python -m serving` as a process, alone and on two ranks: what clients see when it ends, and when a rank dies."""

import json
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

import pytest

from common import cli
from engine.sampling.distribution import SamplingParams
from serving.serve import SIGNALS, Serve, open_server
from tests.support.serving_cases import FLAGS, Alone, Served, serving_process


def begun(server: Served, n: int, n_new: int = 250) -> list:
    """Begin streams, and read their first events."""
    body = {"inputs": "a b c", "parameters": {"max_new_tokens": n_new}}
    responses = [server.begin("/generate_stream", body).getresponse() for _ in range(n)]
    for response in responses:
        assert response.readline().startswith(b"data: ")
    return responses


@pytest.mark.slow
def test_two_ranks_answer_as_one_process(tmp_path, chat_checkpoint, alone: Alone):
    def ask(number: int) -> list[int]:
        how = {"temperature": 0.8, "seed": number, "max_new_tokens": 20 + number}
        return [token["id"] for token in server.generate(f"number {number}", **how)["details"]["tokens"]]

    sampling = [SamplingParams(0.8, seed=number) for number in range(8)]
    expected = [alone.tokens(f"number {number}", 20 + number, params) for number, params in enumerate(sampling)]

    with serving_process(tmp_path, chat_checkpoint, 2) as (job, server):
        time.sleep(2.5)  # idle for longer than a heartbeat
        with ThreadPoolExecutor(6) as pool:
            assert [*pool.map(ask, range(8))] == expected
        body = {"prompt": "a b c", "n": 2, "max_tokens": 9, "temperature": 0, "echo": True, "logprobs": 1}
        choices = server.ask("/v1/completions", body).json["choices"]
        ids = [*alone.tokenizer.encode("a b c"), *alone.tokens("a b c", 9)]
        wanted = [row[id_].item() for row, id_ in zip(alone.scores(ids), ids[1:], strict=True)]
        for choice in choices:
            assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-5)
        server.begin("/generate", {"inputs": "a b c", "parameters": {"max_new_tokens": 250}}).close()
        server.until(lambda: server.metrics()["tgi_batch_current_size"] == 0, "a free row")
        leader = job.rank(0)
        assert leader is not None
        os.kill(leader, signal.SIGTERM)
        assert job.end(30).code == 0


@pytest.mark.slow
def test_a_signal_lets_running_requests_end(tmp_path, chat_checkpoint, alone: Alone):
    with serving_process(tmp_path, chat_checkpoint, 1) as (job, server):
        streams = begun(server, 5, 120)
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):  # make repeats its group's
            job.launcher.send_signal(number)
            time.sleep(0.05)
        for stream in streams:
            last = json.loads(stream.read().decode().split("\n\n")[-2].removeprefix("data: "))
            assert last["generated_text"] == alone.text("a b c", 120)
        ended = job.end(30)
        assert (ended.code, ended.out) == (0, "") and "Traceback" not in ended.err, ended.err


def test_a_signal_that_does_not_wake_the_wait_ends_the_server(chat_checkpoint, monkeypatch):
    """Such is one that comes between Python's last look and the wait, and one that another thread gets."""
    flags = cli.read(Serve, ["--model", f"{chat_checkpoint}", "--port=0", *FLAGS.split()], prog="serving")
    scheduler, server = open_server(flags)
    monkeypatch.setattr("serving.serve.open_server", lambda flags: (scheduler, server))
    ended, woken = threading.Event(), []

    def send() -> None:
        served = Served(server, threading.current_thread(), [])
        try:
            for text, n in (("a", 3), ("b c", 7)):
                served.generate(text, max_new_tokens=n)
            served.until(lambda: scheduler.step_began is None, "the wait")
            signal.raise_signal(signal.SIGTERM)
            woken.append(ended.wait(10))
        finally:
            scheduler.stop()

    before, sender = {number: signal.getsignal(number) for number in SIGNALS}, threading.Thread(target=send)
    sender.start()
    try:
        flags.run()
    finally:
        ended.set()
        sender.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert woken == [True]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_clients_see_that_a_rank_died(tmp_path, chat_checkpoint, rank):
    with serving_process(tmp_path, chat_checkpoint, 2) as (job, server):
        streams = begun(server, 2)
        pid = job.rank(rank)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            if rank == 1:
                last = stream.read().decode().split("\n\n")[-2].strip()
                assert json.loads(last.removeprefix("data: "))["error_type"] == "unavailable"
            else:
                with pytest.raises((HTTPException, OSError)):
                    stream.read()
        ended = job.end(60)
        assert ended.code != 0 and not job.processes()
        assert f"rank      : {rank}" in ended.first_to_fail
