"""What a server tells of its work: metrics that add up, failures by their kinds, and a line in the log a request."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from serving_cases import serving, slow

STREAM, TGI, V1 = "/generate_stream", "/generate", "/v1/completions"


def test_failures_are_counted_by_their_kinds(chat_checkpoint):
    with serving(chat_checkpoint, "--api_key k --request_seconds 1 --max_body_bytes 900") as one, slow(one, 0.03):
        key, body = {"Authorization": "Bearer k"}, {"inputs": "a", "parameters": {"max_new_tokens": 200}}
        assert one.ask(TGI, body).status == 401
        assert one.ask(TGI, {"inputs": 3}, key).status == one.ask(TGI, {"inputs": ""}, key).status == 422
        assert one.ask(TGI, {"inputs": "a" * 1000}, key).status == 413
        assert one.ask(V1, {"prompt": [3] * 320}, key).status == 413
        assert one.ask(TGI, {"inputs": "a" * 400}, key).status == 422
        assert one.ask(TGI, body, key).status == 504 and one.ask(STREAM, body, key).status == 200
        with closing(one.connect()) as gone:
            gone.request("POST", TGI, json.dumps(body), {"Content-Type": "application/json", **key})
            one.until(lambda: bool(one.server.service.jobs), "a request")
        one.until(lambda: not one.server.service.jobs, "its end")
        assert one.counted_failures(**key) == {
            "unauthorized": 1,
            "validation": 2,
            "too_large": 2,
            "context_length_exceeded": 1,
            "timeout": 2,
            "cancelled": 1,
        }


def test_metrics_add_up(chat_checkpoint):
    with serving(chat_checkpoint) as one:
        with ThreadPoolExecutor(6) as pool:
            asked = [{"max_new_tokens": n, "temperature": 0.9, "seed": n} for n in range(5, 35, 5)]
            answers = [*pool.map(lambda how: one.generate("count", **how)["details"], asked)]
        metrics = one.metrics()
        sums = {name: sum(one["speculation"][name] for one in answers) for name in ("rounds", "drafted", "accepted")}
        n_new = sum(one["generated_tokens"] for one in answers)
        assert metrics["tgi_request_skipped_tokens_sum"] == sums["accepted"] > 0
        assert metrics["tgi_request_skipped_tokens_count"] == sums["rounds"]
        assert metrics["vllm:spec_decode_num_drafts_total"] == sums["rounds"]
        assert metrics["vllm:spec_decode_num_draft_tokens_total"] == sums["drafted"]
        assert metrics["vllm:spec_decode_num_accepted_tokens_total"] == sums["accepted"]
        at = [metrics[f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(3)]
        assert sum(at) == sums["accepted"] and at == sorted(at, reverse=True)
        assert metrics["foretoken_decode_tokens_total"] == metrics["tgi_request_generated_tokens_sum"] == n_new
        assert metrics["foretoken_prefill_tokens_total"] + metrics["foretoken_reused_prompt_tokens_total"] == 6 * 6
        assert metrics["tgi_request_count"] == metrics["tgi_request_success"] == 6
        for name in ("queue_duration", "inference_duration", "duration", "mean_time_per_token_duration"):
            assert metrics[f"tgi_request_{name}_count"] == 6


def test_a_line_in_the_log_for_every_request(chat_checkpoint, capsys):
    for flags, shown in (("", False), ("--log_prompts", True)):
        with serving(chat_checkpoint, flags) as one:
            one.generate("confidential", max_new_tokens=4)
            one.ask(V1, {"prompt": 3})
            one.until_idle()
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        whole, refused = lines
        assert (whole["route"], whole["status"], whole["finish"]) == (TGI, 200, "length")
        assert (whole["prompt_tokens"], whole["new_tokens"]) == (13, 4)
        assert 0 <= whole["queue_ms"] <= whole["ttft_ms"] <= whole["total_ms"]
        assert (refused["route"], refused["status"]) == (V1, 422)
        assert ("confidential" in json.dumps(lines)) is shown
