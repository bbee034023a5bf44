"""`headloom serve` over real HTTP: answers, streams, logprobs, refusals, clients that go away, the end."""

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time

import pytest
import torch
from cli_support import BINARY, ENVIRONMENT, headloom
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")

CORPUS = "The quick brown fox jumps over the lazy dog. Straße, 3 €, 😀!\n"
ATTENTION = """
[model]
width = 32
depth = 2
[[model.layer]]
mixer = { type = "dcmha", heads = 2 }
"""
RECURRENCE = """
[model]
width = 32
depth = 2
position = { type = "none" }
[[model.layer]]
mixer = { type = "rwkv" }
channel = { type = "rwkv_channel" }
"""
TASK = """
[task]
type = "text"
paths = ["corpus.txt"]
length = 48
eval_tokens = 480
[train]
steps = 60
batch = 8
warmup = 5
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the runs `attention`, of length 48, and `recurrence`, which has none."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "corpus.txt").write_text(CORPUS * 60)
    for name, model in [("attention", ATTENTION), ("recurrence", RECURRENCE)]:
        (folder / f"{name}.toml").write_text(model + TASK)
        headloom("train", f"{name}.toml", "--out", name, cwd=folder)
    return folder


class Server:
    """A process that serves, and requests to it."""

    def __init__(self, run, cwd, *options):
        self.process = subprocess.Popen(
            [str(BINARY), "serve", str(run), "--port", "0", *map(str, options)],
            cwd=cwd,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.line = self.process.stdout.readline()
        found = re.search(r" at http://127\.0\.0\.1:(\d+)/v1$", self.line.strip())
        assert found, self.line + self.process.stderr.read()
        self.port = int(found[1])

    def ask(self, method, path, body=None, headers={"Content-Type": "application/json"}):
        """Status and JSON. A dict is sent as JSON, bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, headers)
            response = connection.getresponse()
            assert response.getheader("Content-Type") == "application/json"
            return response.status, json.loads(response.read().decode())
        finally:
            connection.close()

    def complete(self, **body):
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer

    def refused(self, status, **body):
        found, answer = self.ask("POST", "/v1/completions", body)
        assert found == status, answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return answer["error"]

    @contextlib.contextmanager
    def open(self, path="/v1/completions", **body):
        """The connection of a request that is sent and not yet read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        try:
            yield connection
        finally:
            connection.close()

    def stream(self, **body):
        """The chunks of a stream, as they come."""
        with self.open(stream=True, **body) as connection:
            response = connection.getresponse()
            assert response.status == 200 and response.getheader("Content-Type") == "text/event-stream"
            while line := response.readline():
                assert line.startswith(b"data: ") and response.readline() == b"\n"
                if line == b"data: [DONE]\n":
                    assert response.read() == b""
                    return
                yield json.loads(line.removeprefix(b"data: ").decode())
        raise AssertionError("the stream ended without [DONE]")

    def load(self):
        health = self.ask("GET", "/health")[1]
        assert health.pop("status") == "ok"
        return health

    def wait_for(self, **load):
        for _ in range(400):
            if self.load() == load:
                return
            time.sleep(0.02)
        assert self.load() == load

    def end(self, *signals):
        for number in signals or [signal.SIGINT]:
            self.process.send_signal(number)
        try:
            self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        return self.process.returncode


@contextlib.contextmanager
def serving(run, cwd, *options):
    server = Server(run, cwd, *options)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


@pytest.fixture(scope="module")
def recurrence(place):
    with serving("recurrence", place) as server:
        yield server


@pytest.fixture(scope="module")
def attention(place):
    with serving("attention", place, "--max-batch", 4) as server:
        yield server


def test_what_is_served(attention, recurrence):
    assert attention.line.startswith("serving attention, step ") and ", length 48, as 'attention' at" in attention.line
    assert "length without limit" in recurrence.line
    status, models = attention.ask("GET", "/v1/models")
    assert status == 200 and models["object"] == "list"
    (model,) = models["data"]
    assert model["id"] == "attention" and model["object"] == "model" and model["max_model_len"] == 48
    assert recurrence.ask("GET", "/v1/models")[1]["data"][0]["max_model_len"] is None
    assert attention.load() == {"running": 0, "waiting": 0}


def test_an_answer(attention, place):
    answer = attention.complete(model="attention", prompt="The quick", max_tokens=12, temperature=0)
    assert answer["object"] == "text_completion" and answer["model"] == "attention" and answer["id"].startswith("cmpl-")
    assert abs(answer["created"] - time.time()) < 60
    (choice,) = answer["choices"]
    assert choice["index"] == 0 and choice["logprobs"] is None and choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}
    written = headloom("generate", "attention", "--prompt", "The quick", "--tokens", 12, "--temperature", 0, cwd=place)
    assert "The quick" + choice["text"] + "\n" == written.stdout
    # Texts, ids, several prompts, samples; the same seed gives the same text.
    ids = list(b"The quick")
    several = attention.complete(prompt=[ids, list(b"Stra")], max_tokens=12, temperature=0)["choices"]
    assert [c["index"] for c in several] == [0, 1] and several[0]["text"] == choice["text"]
    one, other = (attention.complete(prompt=ids, max_tokens=12, n=2, seed=3)["choices"] for _ in range(2))
    assert one == other and one[0]["text"] != one[1]["text"]
    assert attention.complete(prompt=ids, max_tokens=12, seed=4)["choices"][0]["text"] == one[1]["text"]
    # A stop string is not shown.
    text = choice["text"]
    stopped = attention.complete(prompt=ids, max_tokens=12, temperature=0, stop=["nowhere", text[3:5]])["choices"][0]
    assert stopped["text"] == text[: text.index(text[3:5])] and stopped["finish_reason"] == "stop"


def test_serve_forgets_as_told(place):
    with serving("attention/", place, "--cache", "sinks:9") as server:
        assert ", as 'attention' at" in server.line
        # Positions are counted anew among those kept, so that there is no longest text.
        assert "length without limit" in server.line
        answer = server.complete(prompt="The quick", max_tokens=100, temperature=0)
    assert answer["usage"]["completion_tokens"] == 100
    options = ["--tokens", 100, "--temperature", 0, "--cache", "sinks:9"]
    written = headloom("generate", "attention", "--prompt", "The quick", *options, cwd=place)
    assert "The quick" + answer["choices"][0]["text"] + "\n" == written.stdout


def headloom_model(run):
    import headloom

    return headloom.load(run)


def test_scores_do_not_change_what_attention_forgets(place):
    """Of a large vocabulary the scores of few positions are held at a time."""
    wide = ATTENTION.replace("width = 32", "width = 8\nmax_length = 128\nvocabulary = 300000")
    (place / "wide.toml").write_text(wide + TASK.replace("60", "1"))
    headloom("train", "wide.toml", "--out", "wide", cwd=place)
    with serving("wide", place, "--cache", "window:4") as server:
        body = {"prompt": CORPUS * 3, "max_tokens": 5, "seed": 1, "logprobs": 0}
        plain, echoed = (server.complete(**body, echo=echo)["choices"][0]["logprobs"] for echo in (False, True))
    assert echoed["tokens"][-5:] == plain["tokens"] and echoed["token_logprobs"][-5:] == pytest.approx(plain["token_logprobs"], abs=1e-5)
    prompt = torch.tensor([list((CORPUS * 3).encode()[:100])])
    with serving("wide", place) as server:
        echoed = server.complete(prompt=prompt[0].tolist(), max_tokens=0, logprobs=0, echo=True)["choices"][0]["logprobs"]
    with torch.no_grad():
        expected = headloom_model(place / "wide")(prompt)[0, :-1].log_softmax(-1).gather(-1, prompt[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(echoed["token_logprobs"][1:]), expected, atol=1e-4, rtol=0)


def test_loading_leaves_no_workers(place, monkeypatch):
    """OpenMP's workers of the thread that loads would be more than there are processors, beside those of the engine."""
    threads = []
    for workers in ("1", "2"):
        monkeypatch.setitem(ENVIRONMENT, "OMP_NUM_THREADS", workers)
        with serving("attention", place, "--quantize", "int4") as server:
            server.load()
            threads.append(len(os.listdir(f"/proc/{server.process.pid}/task")))
    assert threads[0] == threads[1]


def test_requests_side_by_side_are_answered_as_alone(attention):
    requests = []
    for i in range(14):
        length = 1 + 5 * i % 31
        body = {"prompt": (CORPUS * 2).encode()[i : i + length], "max_tokens": 3 + 4 * i % 13, "seed": i, "n": 1 + i % 2}
        body["prompt"] = list(body["prompt"])
        body.update([{"temperature": 0}, {"top_p": 0.9}, {"temperature": 1.5, "top_k": 20}, {"repetition_penalty": 1.2}][i % 4])
        requests.append({**body, **({"logprobs": 2, "echo": True} if i % 3 == 0 else {})})
    alone = [attention.complete(**body) for body in requests]
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        together = list(pool.map(lambda body: attention.complete(**body), requests))
    for one, other in zip(alone, together):
        assert one["usage"] == other["usage"]
        for a, b in zip(one["choices"], other["choices"], strict=True):
            assert a["text"] == b["text"] and a["finish_reason"] == b["finish_reason"]
            if a["logprobs"]:
                first, *rest = a["logprobs"]["token_logprobs"]
                assert first is None and rest == pytest.approx(b["logprobs"]["token_logprobs"][1:], abs=1e-4)


@pytest.mark.parametrize("run", ["attention", "recurrence"])
def test_logprobs_are_the_models_own(run, place, request):
    server = request.getfixturevalue(run)
    headloom("eval", run, "--logits", "logits.safetensors", cwd=place)
    tensors = load_file(place / "logits.safetensors")
    rows = [row[:40] for row in tensors["tokens"][:3].tolist()]
    expected = torch.log_softmax(tensors["logits"][:3, :40].float(), -1)
    # As evaluation harnesses ask: one token more than they want.
    answer = server.complete(prompt=rows, max_tokens=1, temperature=0, logprobs=1, echo=True)
    scored = server.complete(prompt=rows, max_tokens=0, logprobs=3, echo=True)
    assert scored["usage"] == {"prompt_tokens": 120, "completion_tokens": 0, "total_tokens": 120}
    for row, best, one, three in zip(rows, expected, answer["choices"], scored["choices"], strict=True):
        assert one["finish_reason"] == three["finish_reason"] == "length"
        assert one["text"].startswith(three["text"].rstrip("\ufffd"))
        assert three["text"] == bytes(row).decode(errors="replace")
        for choice, count, top in [(one, 41, 1), (three, 40, 3)]:
            logprobs = choice["logprobs"]
            assert all(len(list_) == count for list_ in logprobs.values())
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            for t in range(1, 40):
                assert logprobs["token_logprobs"][t] == pytest.approx(best[t - 1, row[t]].item(), abs=1e-4)
                told = logprobs["top_logprobs"][t]
                assert top <= len(told) <= top + 1 and told[logprobs["tokens"][t]] == logprobs["token_logprobs"][t]
                assert sorted(told.values())[-top:] == pytest.approx(best[t - 1].topk(top).values.flip(0).tolist(), abs=1e-4)
        greedy = one["logprobs"]
        assert greedy["token_logprobs"][40] == max(greedy["top_logprobs"][40].values())
        assert greedy["token_logprobs"][40] == pytest.approx(best[39].max().item(), abs=1e-4)


def token_bytes(name):
    if name.startswith("bytes:"):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return name.encode()


def test_whatever_the_model_writes_is_valid_text(recurrence):
    broken = 0
    for seed in range(4):
        body = {"prompt": "3 €", "max_tokens": 120, "temperature": 3, "seed": seed, "logprobs": 1, "echo": True}
        choice = recurrence.complete(**body)["choices"][0]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        ended = choice["finish_reason"] == "stop"
        assert tokens[-1] == "\0" or not ended  # the end is told, but no text
        spelled = [token_bytes(name) for name in tokens[: len(tokens) - ended]]
        assert choice["text"] == b"".join(spelled).decode(errors="replace")
        broken += "\ufffd" in choice["text"]
        assert offsets[:5] == [0, 1, 2, 2, 2] and offsets[-1] <= len(choice["text"])
        # A token begins in the character that its first byte belongs to.
        begins = [sum(map(len, spelled[:i])) for i in range(len(spelled))]
        places = [len(b"".join(spelled)[: begin + 1].decode(errors="replace")) - 1 for begin in begins]
        assert offsets[: len(spelled)] == places
        # A stream cuts characters nowhere.
        chunks = [chunk["choices"][0] for chunk in recurrence.stream(**body)]
        assert "".join(c["text"] for c in chunks) == choice["text"]
        for key in choice["logprobs"]:
            joined = [value for c in chunks for value in c["logprobs"][key]]
            assert joined == choice["logprobs"][key]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]
    assert broken > 0


def test_streams(recurrence):
    body = {"prompt": ["The quick", "over"], "n": 2, "max_tokens": 30, "seed": 5, "stop": "q"}
    whole = recurrence.complete(**body)
    chunks = list(recurrence.stream(**body, stream_options={"include_usage": True}))
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    texts, finishes = [""] * 4, [None] * 4
    for chunk in chunks:
        assert chunk["object"] == "text_completion" and chunk["id"] == last["id"] and chunk["usage"] is None
        (choice,) = chunk["choices"]
        assert choice["logprobs"] is None and finishes[choice["index"]] is None
        texts[choice["index"]] += choice["text"]
        finishes[choice["index"]] = choice["finish_reason"]
    assert texts == [c["text"] for c in whole["choices"]]
    assert finishes == [c["finish_reason"] for c in whole["choices"]]
    assert all("usage" not in chunk for chunk in recurrence.stream(prompt="a", max_tokens=2))


def test_tokens_are_counted(attention):
    assert attention.ask("GET", "/tokenizer_info") == (200, {"eos_token": "\0", "bos_token": None})
    status, answer = attention.ask("POST", "/tokenize", {"prompt": "aß", "add_special_tokens": False})
    assert status == 200 and answer == {"count": 3, "max_model_len": 48, "tokens": list("aß".encode())}
    assert attention.ask("POST", "/tokenize", {"prompt": "\0"})[1]["tokens"] == [0]
    assert attention.ask("POST", "/detokenize", {"tokens": list("aß".encode())}) == (200, {"prompt": "aß"})
    assert attention.ask("POST", "/detokenize", {"tokens": [195]}) == (200, {"prompt": "\ufffd"})
    for token in (-7, 256, 10**9):
        status, answer = attention.ask("POST", "/detokenize", {"tokens": [97, token]})
        assert status == 400 and answer["error"]["message"] == f"'tokens' has the token {token}, expected 0 to 255."
    assert attention.ask("POST", "/tokenize", {})[0] == 400
    assert attention.ask("POST", "/detokenize", {"tokens": ["a"]})[0] == 400


def test_bad_requests_harm_nobody(attention, recurrence):
    body = {"prompt": "The", "max_tokens": 600, "temperature": 0}
    expected = recurrence.complete(**body)["choices"][0]["text"]
    stream = recurrence.stream(**body)
    begun = next(stream)["choices"][0]["text"]

    def message(status, **body):
        return recurrence.refused(status, **body)["message"]

    assert message(400, prompt="a", max_tokens="ten") == "'max_tokens' is \"ten\", expected an integer from 0 to 1073741824."
    assert recurrence.refused(400, prompt="a", max_tokens=-1)["param"] == "max_tokens"
    assert message(400) .startswith("'prompt' is missing, expected a text")
    assert message(400, prompt=[1, 256]) == "the prompt has the token 256, expected 0 to 255."
    assert message(400, prompt=[[1], [-1]]) == "prompt 2 has the token -1, expected 0 to 255."
    assert message(400, prompt="a", promt="b") == 'unknown key "promt"; did you mean \'prompt\'?'
    assert recurrence.refused(400, prompt="a", promt="b")["param"] == "promt"
    assert recurrence.refused(400, prompt="a", **{"x" * 1000: "b"})["param"] is None
    assert message(400, prompt=["a"] * 300) == "'prompt' has 300 prompts and n is 1, expected at most 256 texts in all."
    assert message(400, prompt="a", n=17).startswith("'n' is 17, expected an integer from 1 to 16, the texts that are written")
    unknown = recurrence.refused(404, prompt="a", model="gpt-4")
    assert unknown["code"] == "model_not_found" and unknown["message"] == "there is no model \"gpt-4\" here, but 'recurrence'."
    long = attention.refused(400, prompt=[1] * 40, max_tokens=9)
    assert long["code"] == "context_length_exceeded" and long["type"] == "invalid_request_error"
    assert long["message"] == (
        "the prompt has 40 tokens and max_tokens is 9, together more than the model's length of 48."
    )
    assert attention.complete(prompt=[1] * 40, max_tokens=8)["usage"]["prompt_tokens"] == 40

    # What is no JSON, no text, too large, of another type; another path, another method.
    post = lambda raw, **options: recurrence.ask("POST", "/v1/completions", raw, **options)
    for raw, part in [
        (b"", "the body is not JSON: it is empty."),
        (b'{"prompt" 3}', "the body is not JSON: it has '3' in column 11, where it does not belong."),
        (b'{"prompt": "\xff"}', "the body is not JSON: "),
        (b"[" * 100_000, "nested deeper than 8 levels"),
        (b'{"prompt": "\\ud800"}', "the body is not JSON: it has \\ud800 in column 13, which is half a character."),
        (b'{"prompt": "a\\udc00"}', "the body is not JSON: it has \\udc00 in column 14, which is half a character."),
        (b'{"prompt": "\\ud83d\\ude00"x}', "the body is not JSON: it has 'x' in column 26, where it does not belong."),
        (b'{"prompt": "a", "max_tokens": 1, "max_tokens": 3}', 'the body has the key "max_tokens" twice in one object.'),
        (b'{"prompt": "a", "stream_options": {"a": 1, "a": 2}}', 'the body has the key "a" twice in one object.'),
        (b"5", "the body is 5, expected a JSON object."),
    ]:
        status, answer = post(raw)
        assert status == 400 and part in answer["error"]["message"] and "\n" not in answer["error"]["message"]
    status, answer = post(b'{"prompt": "' + b"a" * (5 << 20) + b'"}')
    assert status == 413 and answer["error"]["message"] == "the body is larger than 4194304 bytes."
    for kind in ["text/plain", "application/x-www-form-urlencoded"]:
        status, answer = post(b'{"prompt": "' + b"a" * 10_000 + b'"}', headers={"Content-Type": kind})
        assert status == 415 and answer["error"]["message"] == f"the Content-Type is '{kind}', expected application/json."
    for method, path in [("GET", "/v1/completion"), ("POST", "/v1/embeddings"), ("GET", "/../../etc/passwd")]:
        status, answer = recurrence.ask(method, path)
        assert status == 404 and answer["error"]["message"].startswith(f"there is no {method} ")

    # No HTTP at all, and clients that go away in the middle of a request.
    for raw in [b"\0\xff\n\n", b"GET\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{"]:
        with socket.create_connection(("127.0.0.1", recurrence.port)) as s:
            s.sendall(raw)
    assert begun + "".join(chunk["choices"][0]["text"] for chunk in stream) == expected


ENDLESS = {"prompt": "The", "max_tokens": 10**9, "temperature": 0}


def exchanged(port, raw):
    """What comes back for the bytes of a request: the status, the head's lines, the body."""
    with socket.create_connection(("127.0.0.1", port)) as s, s.makefile("rb") as answer:
        s.settimeout(30)
        s.sendall(raw)
        head, body = answer.read().split(b"\r\n\r\n", 1)
        first, *lines = head.decode().split("\r\n")
        return int(first.split()[1]), lines, body


def test_a_client_of_the_old_protocol(recurrence):
    """HTTP/1.0 has no chunks: a stream ends with its connection, as the answer says once."""
    body = {"prompt": "over", "max_tokens": 3, "temperature": 0}
    expected = recurrence.complete(**body)["choices"][0]["text"]
    for stream in (False, True):
        text = json.dumps({**body, "stream": stream}).encode()
        raw = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
        status, lines, answer = exchanged(recurrence.port, raw)
        assert status == 200 and lines.count("Connection: close") == 1
        if stream:
            assert not any(line.startswith(("Transfer-Encoding", "Content-Length")) for line in lines)
            *events, done, end = answer.decode().split("\n\n")
            assert done == "data: [DONE]" and end == ""
            texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
        else:
            texts = [json.loads(answer)["choices"][0]["text"]]
        assert "".join(texts) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_is_cancelled(recurrence, stream):
    body = {"prompt": "over", "max_tokens": 100, "temperature": 0}
    expected = recurrence.complete(**body)["choices"][0]["text"]
    with recurrence.open(**ENDLESS, stream=stream):
        with recurrence.open(**{**ENDLESS, "prompt": [list(b"a")] * 20}, stream=stream):
            recurrence.wait_for(running=16, waiting=5)
        recurrence.wait_for(running=1, waiting=0)
        assert recurrence.complete(**body)["choices"][0]["text"] == expected
    recurrence.wait_for(running=0, waiting=0)


def test_the_queue_has_an_end(place):
    with serving("recurrence", place, "--max-batch", 1, "--max-queue", 1) as server:
        with server.open(**ENDLESS):
            server.wait_for(running=1, waiting=0)
            with server.open(prompt="a", max_tokens=2) as waiting:
                server.wait_for(running=1, waiting=1)
                full = server.refused(429, prompt="a")
                assert full["code"] == "queue_full" and full["type"] == "rate_limit_error"
                assert full["message"].startswith("1 texts are waiting and this request has 1, more than the 1 that may wait")
        # Both are gone.
        server.wait_for(running=0, waiting=0)
        assert server.complete(prompt="a", max_tokens=2)["usage"]["completion_tokens"] <= 2
        assert server.end() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_lets_what_was_begun_finish(place, number):
    with serving("recurrence", place, "--max-batch", 1) as server:
        body = {"prompt": "over", "max_tokens": 5, "temperature": 0}
        expected = server.complete(**body)["choices"]
        stream = server.stream(**ENDLESS)
        next(stream)
        with server.open(**body) as waiting:
            # Endless until its client hangs up: which text runs and which waits does not depend on who is faster.
            server.wait_for(running=1, waiting=1)
            server.process.send_signal(number)
            said = server.process.stderr.readline()
            assert said == "headloom: ending when the 2 texts in progress are done; press Ctrl-C again to stop at once.\n"
            for _ in range(1000):
                assert "text" in next(stream)["choices"][0]
            stream.close()
            assert json.loads(waiting.getresponse().read())["choices"] == expected
        server.process.wait(timeout=30)
        assert server.process.returncode == 0 and server.process.stderr.read() == ""
        with pytest.raises(OSError):
            server.complete(prompt="a")


def test_the_end_does_not_wait_for_half_a_request(place):
    with serving("recurrence", place) as server:
        halves = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        halves[0].sendall(b"GET /hea")
        halves[1].sendall(b"POST /tokenize HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        for s in halves:
            s.settimeout(3)
            with s, s.makefile("rb") as answer:
                assert b" 503 " in answer.readline()
                assert b"the server is ending." in answer.read()
        server.process.wait(timeout=5)
        assert server.process.returncode == 0 and server.process.stderr.read() == ""


def test_a_second_interrupt_ends_at_once(place):
    with serving("recurrence", place) as server:
        with server.open(**ENDLESS):
            server.wait_for(running=1, waiting=0)
            server.process.send_signal(signal.SIGINT)
            said = server.process.stderr.readline()
            assert said == "headloom: ending when the text in progress is done; press Ctrl-C again to stop at once.\n"
            time.sleep(0.8)  # what comes within half a second is the same request
            assert server.end() == -signal.SIGINT


def test_what_cannot_be_served(place, attention):
    def refused(*arguments, code):
        stderr = headloom("serve", *arguments, cwd=place, code=code).stderr
        (line,) = [line for line in stderr.splitlines() if line.startswith("headloom: ")]
        return line.removeprefix("headloom: ")

    assert refused("nothing", code=1) == "nothing: is not the folder of a run."
    message = refused("attention", "--port", attention.port, code=1)
    assert message == f"cannot listen at 127.0.0.1:{attention.port}: Address already in use."
    assert refused("attention", "--host", "", "--port", 0, code=2) == "--host is empty, expected a name."
    assert "cannot listen at no.such.host.invalid:0: " in refused("attention", "--host", "no.such.host.invalid", "--port", 0, code=1)
    (place / "encoder.toml").write_text(
        '[model]\nkind = "encoder"\nwidth = 16\ndepth = 1\n[task]\ntype = "masked_text"\npaths = ["corpus.txt"]\nlength = 16\n'
        "eval_tokens = 64\n[train]\nsteps = 1\nbatch = 2\n"
    )
    headloom("train", "encoder.toml", "--out", "encoder", cwd=place)
    assert 'kind "encoder", which cannot continue a text' in refused("encoder", code=2)
