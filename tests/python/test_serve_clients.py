"""What clients of `headloom serve` may do: ask for too much, close their half, go, be slow, be many, send anything."""

import concurrent.futures
import contextlib
import http.client
import json
import pathlib
import random
import resource
import socket
import time

import pytest

from test_serve import BINARY, ENDLESS, TASK, headloom, place, recurrence, serving  # noqa: F401

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")


def peak(server):
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def address_space(server):
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmSize:")[1].split()[0]) * 1024


def test_nothing_is_allocated_before_it_is_checked(recurrence):
    recurrence.complete(prompt="a", max_tokens=2)
    before = peak(recurrence)
    tokens = [1] * 100_000
    for param, body in [
        ("n", {"n": 30_000_000}),
        ("n", {"n": 2**63 - 1}),
        ("n", {"n": 1e300}),
        ("prompt", {"prompt": ["a"] * 30_000}),
        ("prompt", {"prompt": ["a"] * 20, "n": 16}),
        ("max_tokens", {"max_tokens": 2**40}),
        ("best_of", {"best_of": 2**40}),
        ("logprobs", {"logprobs": 2**40}),
        ("stop", {"stop": ["x"] * 20_000}),
        ("stop", {"stop": "x" * 2_000_000}),
        ("echo", {"prompt": tokens, "echo": True, "n": 16, "logprobs": 20, "max_tokens": 0}),
    ]:
        error = recurrence.refused(400, **{"prompt": "a", **body})
        assert error["param"] == param and error["type"] == "invalid_request_error", error
        assert error["message"].startswith(f"'{param}' ") and len(error["message"]) < 300
    assert peak(recurrence) - before < 100
    help_ = headloom("serve", "--help", cwd=".").stdout
    for limit in ["4194304 bytes", "65536", "1073741824", "2097152", "at most 20", "64 texts of 1024 bytes", "--max-batch + --max-queue + 8"]:
        assert limit in help_, limit


def raw_request(body, path="/v1/completions", more=""):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{more}\r\n"
    return head.encode() + data


def read_all(s):
    out = b""
    while part := s.recv(65536):
        out += part
    return out


@pytest.mark.parametrize("wait", [0, 0.7])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_half_gets_its_answer(recurrence, stream, wait):
    body = {"prompt": "over", "max_tokens": 300, "temperature": 0, "stream": stream}
    expected = recurrence.complete(**{**body, "stream": False})["choices"][0]["text"]
    others = []
    if wait:  # the answer waits in the queue, so that the server asks whether its client is there
        other = {**ENDLESS, "prompt": ["a"] * 16}
        others.append(socket.create_connection(("127.0.0.1", recurrence.port)))
        others[0].sendall(raw_request(other))
        recurrence.wait_for(running=16, waiting=0)
    with socket.create_connection(("127.0.0.1", recurrence.port), timeout=60) as s:
        s.sendall(raw_request(body))
        s.shutdown(socket.SHUT_WR)
        time.sleep(wait)
        for other in others:
            other.close()
        answer = read_all(s)
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n"), answer[:200]
    if not stream:
        assert json.loads(rest)["choices"][0]["text"] == expected
        return
    events, at = b"", 0
    while size := int(rest[at : rest.index(b"\r\n", at)], 16):
        at = rest.index(b"\r\n", at) + 2
        events += rest[at : at + size]
        at += size + 2
    chunks = events.decode().split("\n\n")
    assert chunks[-2:] == ["data: [DONE]", ""] and all(chunk.startswith("data: ") for chunk in chunks[:-1])
    assert "".join(json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks[:-2]) == expected
    recurrence.wait_for(running=0, waiting=0)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_half_and_goes_is_cancelled(recurrence, stream, waits):
    s = socket.create_connection(("127.0.0.1", recurrence.port))
    s.sendall(raw_request({**ENDLESS, "stream": stream}, more="Expect: 100-continue\r\n" if waits else ""))
    if waits:
        assert s.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    s.shutdown(socket.SHUT_WR)
    recurrence.wait_for(running=1, waiting=0)
    time.sleep(0.5)
    assert recurrence.load()["running"] == 1
    s.close()
    recurrence.wait_for(running=0, waiting=0)


def test_a_client_that_does_not_read_is_dropped(recurrence):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(("127.0.0.1", recurrence.port))
        s.sendall(raw_request({**ENDLESS, "stream": True, "prompt": ["a"] * 16, "logprobs": 20}))
        recurrence.wait_for(running=16, waiting=0)
        for _ in range(60):
            if recurrence.load()["running"] == 0:
                break
            time.sleep(0.5)
        assert recurrence.load()["running"] == 0


def test_models_by_name(recurrence):
    status, model = recurrence.ask("GET", "/v1/models/recurrence")
    assert status == 200 and model == recurrence.ask("GET", "/v1/models")[1]["data"][0]
    for name in ["gpt-4", "recurrence/x", "%00", "a" * 5000]:
        status, answer = recurrence.ask("GET", "/v1/models/" + name)
        assert status == 404 and answer["error"]["code"] == "model_not_found" and len(answer["error"]["message"]) < 200


def test_every_path_looks_at_the_model(recurrence):
    for path, body in ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]}):
        assert recurrence.ask("POST", path, {**body, "model": "recurrence"})[0] == 200
        for model, status in ("gpt-4", 404), (5, 400):
            found, answer = recurrence.ask("POST", path, {**body, "model": model})
            assert found == status and ("model" in answer["error"]["message"]), answer


def test_an_encoding_that_is_refused_is_not_used(recurrence):
    prompt = json.dumps({"prompt": "a" * 5000, "max_tokens": 1, "echo": True}).encode()

    def encoding(accepted):
        answer = talk(recurrence.port, raw_request(prompt, more=f"Accept-Encoding: {accepted}\r\n"))
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert head.startswith(b"http/1.1 200"), answer
        return b"content-encoding" in head

    assert encoding("br, gzip") and encoding("br;q=0.5, gzip;q=0.01")
    assert not any(map(encoding, ["identity", "br;q=0, gzip;q=0, identity", "br ; Q=0.000,gzip;q=0"]))


def metrics(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.status == 200 and response.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    text = response.read().decode()
    assert text.endswith("\n")
    values, described = {}, {}
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            described.setdefault(name, {})[what] = rest
        else:
            name, value = line.rsplit(" ", 1)
            values[name] = float(value)
            base = name.split("{")[0]
            family = base if base in described else base.rsplit("_", 1)[0]
            assert set(described[family]) == {"HELP", "TYPE"}, line
            assert described[family]["TYPE"] in ("counter", "gauge", "histogram")
    return values


def test_metrics(place):
    with serving("attention", place) as server:
        before = metrics(server)
        assert before["headloom_prompt_tokens_total"] == before["headloom_state_bytes"] == 0
        server.complete(prompt=[1, 2, 3], max_tokens=5, temperature=0)
        server.refused(400, prompt=7)
        server.ask("GET", "/nowhere")
        after = metrics(server)
        assert after["headloom_prompt_tokens_total"] == 3 and after["headloom_generated_tokens_total"] <= 5
        assert after['headloom_requests_total{path="/v1/completions",status="200"}'] == 1
        assert after['headloom_requests_total{path="/v1/completions",status="400"}'] == 1
        assert after['headloom_requests_total{path="other",status="404"}'] == 1
        assert after['headloom_requests_total{path="/metrics",status="200"}'] == 1
        # Times are told, and texts leave, once the answers have been sent.
        server.wait_for(running=0, waiting=0)
        count = 'headloom_request_seconds_count{path="/v1/completions"}'
        for _ in range(200):
            if (after := metrics(server)).get(count) == 2:
                break
            time.sleep(0.01)
        assert after[count] == 2
        assert after['headloom_request_seconds_bucket{path="/v1/completions",le="+Inf"}'] == 2
        assert after["headloom_running_texts"] == after["headloom_waiting_texts"] == 0
        assert after["headloom_uptime_seconds"] > before["headloom_uptime_seconds"]
    with serving("recurrence", place, "--max-batch", 2) as server:
        with server.open(**{**ENDLESS, "n": 2}):
            # Two connections may be read in either order, so the first has begun before the second is made.
            server.wait_for(running=2, waiting=0)
            with server.open(**ENDLESS):
                server.wait_for(running=2, waiting=1)
                # Texts run from when their prompt is taken; their state is told once it has been read.
                for _ in range(400):
                    if (busy := metrics(server))["headloom_state_bytes"] > 0:
                        break
                    time.sleep(0.02)
                assert busy["headloom_running_texts"] == 2 and busy["headloom_waiting_texts"] == 1
                assert busy["headloom_state_bytes"] > 0
        server.wait_for(running=0, waiting=0)
        for _ in range(200):
            if metrics(server).get('headloom_requests_total{path="/v1/completions",status="499"}') == 2:
                break
            time.sleep(0.01)
        else:
            raise AssertionError("clients that left are not counted")


def test_pages_of_other_origins(place):
    def headers(server, method, origin, path="/v1/completions", **more):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = json.dumps({"prompt": "a", "max_tokens": 1}) if method == "POST" else None
        connection.request(method, path, body, {"Origin": origin, "Content-Type": "application/json", **more})
        response = connection.getresponse()
        response.read()
        return response.status, {k: v for k, v in response.getheaders() if k.startswith(("Access", "Vary"))}

    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,x-stainless-os"}
    a, b = "https://a.example", "https://b.example"
    with serving("attention", place) as server:
        assert headers(server, "POST", a) == (200, {})
        assert headers(server, "OPTIONS", a, **asks) == (405, {})
    with serving("attention", place, "--cors", f"{a},http://localhost:3000") as server:
        own = {"Access-Control-Allow-Origin": a, "Vary": "Origin"}
        assert headers(server, "POST", a) == (200, own)
        assert headers(server, "GET", a, "/nowhere") == (404, own)
        assert headers(server, "POST", b) == (200, {})
        assert headers(server, "OPTIONS", b, **asks) == (405, {})
        status, found = headers(server, "OPTIONS", a, **asks)
        assert status == 204 and found == {
            **own,
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": "content-type,x-stainless-os",
            "Access-Control-Max-Age": "600",
        }
        evil = {**asks, "Access-Control-Request-Headers": "a;b<script>"}
        assert headers(server, "OPTIONS", a, **evil)[1]["Access-Control-Allow-Headers"] == "Content-Type, Authorization"
    with serving("attention", place, "--cors", "*") as server:
        assert headers(server, "POST", b) == (200, {"Access-Control-Allow-Origin": "*"})
    for wrong in "a.example", "https://a.example/app", "https://A.example", "https://", "https://a.example/", "https://me@a.example":
        error = headloom("serve", "attention", "--cors", wrong, cwd=place, code=2).stderr
        assert f"'{wrong}' is no origin, expected * or one like https://a.example" in error


def test_pages_that_call_this_machine_by_their_own_name(place):
    def said(server, method, path, host):
        return server.ask(method, path, b"{}" if method == "POST" else None, {"Host": host, "Content-Type": "application/json"})

    with serving("attention", place, "--cors", "https://a.example") as server:
        for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/nowhere")):
            status, answer = said(server, method, path, "evil.example:80")
            assert status == 421 and answer["error"]["message"] == (
                "the Host is 'evil.example:80', expected localhost, 127.0.0.1, [::1] and a.example, "
                "because the server is open to this machine alone."
            )
        for host in ("localhost", f"LOCALHOST:{server.port}", "[::1]:1", "a.example"):
            assert said(server, "GET", "/health", host)[0] == 200
        assert said(server, "GET", "/health", '\\"<b>')[0] == 421
    with serving("attention", place, "--cors", "*") as server:
        assert said(server, "GET", "/health", "evil.example")[0] == 200


def talk(port, raw, pieces=1, pause=0.0):
    """The answer to these bytes, from a client that waits for it."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as s:
        try:
            for i in range(pieces):
                s.sendall(raw[i * len(raw) // pieces : (i + 1) * len(raw) // pieces])
                time.sleep(pause)
            return read_all(s)
        except (BrokenPipeError, ConnectionResetError):
            return b""


def test_requests_of_every_shape(recurrence):
    port, body = recurrence.port, json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

    def status(raw, ends=(".", "?"), **options):
        answer = talk(port, raw, **options)
        head, _, rest = answer.partition(b"\r\n\r\n")
        found = int(head.split()[1])
        if found not in (100, 200):
            error = json.loads(rest)["error"]
            assert error["message"].endswith(ends) and "\n" not in error["message"], error
        return found

    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n"
    in_chunks = b"".join(b"%x\r\n%s\r\n" % (len(body[i : i + 5]), body[i : i + 5]) for i in range(0, len(body), 5)) + b"0\r\n\r\n"
    assert status(chunked + in_chunks) == 200
    assert status(chunked + in_chunks, pieces=12, pause=0.02) == 200
    assert status((chunked + in_chunks).replace(b"json", b"JSON").replace(b"chunked", b"Chunked")) == 200
    assert status(raw_request(body), pieces=len(body), pause=0.002) == 200
    assert status(raw_request(body) + raw_request(body)) == 200  # pipelined: the first one is answered
    assert status(raw_request(body, more="Range: bytes=0-0,2-3\r\n")) == 200
    assert status(raw_request(body, more="Expect: 100-continue\r\n")) == 100
    many = b"".join(b"100000\r\n" + b" " * 0x100000 + b"\r\n" for _ in range(8)) + b"0\r\n\r\n"
    assert status(chunked + many) == 413
    assert status(raw_request(b" " * (5 << 20))) == 413
    assert status(post + b"Content-Length: 99999999999999999999\r\n\r\n") == 413
    assert status(post + b"Content-Length: -1\r\n\r\n") == 400
    several = "there are several headers Content-Length, expected one."
    assert status(post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", ends=several) == 400
    assert status(post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n") == 400
    assert status(post + b"\r\n" + body) == 411
    assert status(raw_request(body, more="Content-Encoding: gzip\r\n")) == 415
    assert status(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n") in (413, 431)
    assert status(b"GET /" + b"a" * 100_000) == 431
    assert status(b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", ends="names a path of more than 8192 bytes.") == 414
    header = b"GET /health HTTP/1.1\r\nX-A: %s\r\n\r\n"
    assert status(header % (b"a" * 8100)) == 200
    assert status(header % (b"a" * 9000), ends="a header is larger than 8192 bytes.") == 431
    assert status(b"\0\1\2\3\r\n\r\n") == 400
    assert status(b"PUT /v1/completions HTTP/1.1\r\nContent-Length: 4\r\n\r\nabcd") == 405
    assert status(b"GET /v1/models/%ff%fe HTTP/1.1\r\n\r\n") == 404
    # A target may name the server too.
    assert status(b"GET http://localhost:80/health?x=1 HTTP/1.1\r\n\r\n") == 200
    assert status(raw_request(body).replace(b"/v1/completions", b"HTTP://x/v1/completions")) == 200
    assert status(b"GET http://localhost HTTP/1.1\r\n\r\n") == 404
    assert recurrence.complete(prompt="a", max_tokens=1)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/chat/completions", "POST"),
        ("GET", "/tokenize", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("PUT", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/recurrence", "GET, HEAD"),
    ],
)
def test_a_path_of_another_method_says_which(recurrence, method, path, allowed):
    connection = http.client.HTTPConnection("127.0.0.1", recurrence.port, timeout=60)
    connection.request(method, path, b"{}" if method in ("POST", "PUT") else None, {"Content-Type": "application/json"})
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    assert (response.status, response.getheader("Allow")) == (405, allowed)
    assert error == {
        "message": f"there is no {method} {path} here, expected {allowed.split(',')[0]}.",
        "type": "invalid_request_error",
        "param": None,
        "code": "method_not_supported",
    }


def test_http_1_0_gets_no_chunks(recurrence):
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True, "temperature": 0}).encode()
    for more in ("", "Connection: keep-alive\r\n"):
        answer = talk(recurrence.port, raw_request(body, more=more).replace(b"HTTP/1.1", b"HTTP/1.0", 1))
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert b"200" in head.split(b"\r\n")[0] and b"transfer-encoding" not in head.lower()
        events = rest.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""] and all(event.startswith("data: ") for event in events[:-1])
        text = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])
        assert text == recurrence.complete(prompt="a", max_tokens=3, temperature=0)["choices"][0]["text"]


def wait_for_a_free_connection(server):
    for _ in range(200):
        if server.ask("GET", "/health")[0] == 200:
            return
        time.sleep(0.02)
    raise AssertionError("the server has no free connection")


def test_slow_clients_and_many_of_them(place):
    with serving("recurrence", place, "--max-batch", 2, "--max-queue", 4) as server:  # 14 connections
        expected = server.complete(prompt="a", max_tokens=3, temperature=0)["choices"]
        for _ in range(5):
            idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(13)]
            for s in idle:
                s.sendall(b"POST /v1/comp")
            time.sleep(0.3)
            assert server.complete(prompt="a", max_tokens=3, temperature=0)["choices"] == expected
            idle.append(socket.create_connection(("127.0.0.1", server.port)))
            deadline = time.monotonic() + 5  # until the server has accepted it
            while True:
                status, answer = server.ask("GET", "/health")
                if status == 503 or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            if status == 503:
                break
            # On a busy machine the server may have closed the first ones before the last one came, or refused some
            # because those of the last turn were still open.
            for s in idle:
                s.close()
            time.sleep(2)
        assert status == 503 and answer["error"]["code"] == "too_many_connections"
        assert answer["error"]["message"] == "there are 14 connections already; try later."
        # They have ten seconds for their headers.
        for s in idle[:-1]:
            s.settimeout(30)
            assert read_all(s).startswith(b"HTTP/1.1 408 ")
        for s in idle:
            s.close()
        wait_for_a_free_connection(server)
        assert server.complete(prompt="a", max_tokens=3, temperature=0)["choices"] == expected

        def status(_):
            try:
                return server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 3})[0]
            except OSError:  # one connection too many is closed, maybe before its request was sent
                return 503

        with concurrent.futures.ThreadPoolExecutor(60) as pool:
            answers = list(pool.map(status, range(200)))
        assert set(answers) <= {200, 429, 503} and 200 in answers
        wait_for_a_free_connection(server)
        assert server.complete(prompt="a", max_tokens=3, temperature=0)["choices"] == expected


def test_a_connection_without_a_thread(place):
    with serving("recurrence", place) as server:
        with server.open(**ENDLESS, stream=True) as other:
            assert other.getresponse().readline().startswith(b"data: ")
            # No room for the stack of one more.
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (address_space(server) + (1 << 20), resource.RLIM_INFINITY))
            with contextlib.ExitStack() as silent:
                for _ in range(20):
                    status, answer = server.ask("GET", "/health")
                    if status == 503:
                        break
                    assert status == 200  # of a thread that is idle by now: the next connection keeps it
                    silent.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        assert answer["error"]["message"] == "the server has no thread for one more connection; try later."


def test_any_value_of_any_key(recurrence):
    rng = random.Random(7)
    keys = ["model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "n", "stop", "seed"]
    keys += ["logprobs", "echo", "stream", "stream_options", "user", "best_of", "presence_penalty", "logit_bias", "suffix", "x"]
    values = ["null", "true", "false", "0", "-1", "1", "3", "1e400", "-1e400", "NaN", "Infinity", "1e-320", "9223372036854775807"]
    values += ["-9223372036854775808", "18446744073709551616", "0.5", '""', '"a"', '"\\u0000"', '"\\ud83d"', '"\xff"', "[]", "{}", "[[]]"]
    values += ["[1]", "[255]", "[256]", "[-1]", '["a"]', '["a",1]', "[null]", '{"include_usage": true}', "[" * 7 + "]" * 7, "[" * 9 + "]" * 9]
    statuses = {}
    for _ in range(600):
        pairs = [('"prompt"', rng.choice(['"a"', "[1, 2]"])), ('"max_tokens"', "2")]
        pairs += [(f'"{rng.choice(keys)}"', rng.choice(values)) for _ in range(rng.randrange(3))]
        body = "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
        raw = body.encode("latin-1")
        if rng.random() < 0.3:  # damaged
            at = rng.randrange(len(raw))
            raw = rng.choice([raw[:at], raw[:at] + bytes([rng.randrange(256)]) + raw[at + 1 :], raw[:at] + raw[at:] * 2])
        answer = talk(recurrence.port, raw_request(raw))
        head, _, rest = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        statuses[status] = statuses.get(status, 0) + 1
        if status != 200:
            error = json.loads(rest.decode())["error"]
            assert status in (400, 404) and error["message"].endswith((".", "?")) and "\n" not in error["message"], (raw, error)
            assert len(error["message"]) < 500, (raw, error)
    assert statuses[200] > 50 and statuses[400] > 100
    recurrence.wait_for(running=0, waiting=0)


LONG = """
[model]
width = 256
depth = 4
max_length = 400000
[[model.layer]]
mixer = { type = "mha", heads = 4 }
"""


def test_running_out_of_memory_is_an_answer(place):
    (place / "long.toml").write_text(LONG + TASK.replace("steps = 60", "steps = 1").replace("warmup = 5", "warmup = 1"))
    headloom("train", "long.toml", "--out", "long", cwd=place)
    with serving("long", place) as server:
        small = {"prompt": "a", "max_tokens": 5, "temperature": 0}
        expected = server.complete(**small)["choices"]
        with server.open(prompt="over", max_tokens=5_000, temperature=0, stream=True) as other:
            response = other.getresponse()
            assert response.readline().startswith(b"data: ")
            # 400,000 positions of 4 layers have 3.3 GB of keys and values.
            resource.prlimit(server.process.pid, resource.RLIMIT_AS, (address_space(server) + (1600 << 20), resource.RLIM_INFINITY))
            for _ in range(3):
                error = server.refused(503, prompt="a", max_tokens=390_000)
                assert error["code"] == "out_of_memory" and error["type"] == "server_error"
                assert error["message"].startswith("out of memory: ") and "iB" in error["message"]
            # Who is written already goes on, and so does the server.
            for _ in range(20):
                assert b"error" not in response.readline()
            assert server.complete(**small)["choices"] == expected
            response.close()
        server.wait_for(running=0, waiting=0)
