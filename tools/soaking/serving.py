"""Damaged requests to a running server, by clients that do not behave."""

import contextlib
import json
import pathlib
import re
import select
import signal
import socket
import time

from mutate import BLIND, NUMBERS, change_json, mutate, swap_number
from program import Broken, fault, finish, start
from training import text_run

DOC = "damaged requests to `headloom serve`, and clients that hang up; it must answer well and go on answering"
SHARE = 3
SECONDS = 60  # an answer may take
ROOM = 1 << 30  # bytes that a request may make the server's memory grow by

BODIES = [
    {"prompt": "The quick", "max_tokens": 8, "temperature": 0},
    {"prompt": ["The", "lazy dog"], "max_tokens": 3, "n": 2, "seed": 5, "logprobs": 3, "echo": True},
    {"prompt": [84, 104, 101], "max_tokens": 6, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "stop": ["fox", "\n"], "best_of": 1},
    {"prompt": [[84, 104], [101]], "max_tokens": 4, "repetition_penalty": 1.1, "stream": True, "stream_options": {"include_usage": True}},
    {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 0, "user": "u", "suffix": None, "presence_penalty": 0, "logit_bias": {}},
]
CHAT = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}], "max_tokens": 4}
TEMPLATE = """{%- set names = namespace(count=0) -%}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no ' ~ message.role) }}{% endif -%}
{%- set names.count = names.count + 1 -%}
<{{ message.role | upper }}>{{ message['content'] | trim }}{% if not loop.last %}{{ '\\n' * 2 }}{% endif %}
{%- endfor -%}
{% if add_generation_prompt %}<ASSISTANT {{ names.count }}>{% endif %}
"""
OTHERS = [
    ("POST", "/v1/chat/completions", CHAT), ("POST", "/tokenize", {"prompt": "The quick"}), ("POST", "/detokenize", {"tokens": [84, 104]}),
    ("GET", "/v1/models", None), ("GET", "/v1/models/run", None), ("GET", "/health", None), ("GET", "/metrics", None),
    ("GET", "/tokenizer_info", None), ("GET", "/nothing", None), ("OPTIONS", "/v1/completions", None), ("DELETE", "/v1/models", None),
]  # fmt: skip


def request(method, path, body=b"", headers=()):
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


class Answer:
    """What came back until the other side closed."""

    def __init__(self, data):
        self.data = data
        head, _, rest = data.partition(b"\r\n\r\n")
        first = re.match(rb"HTTP/1\.[01] (\d{3}) ", head + b" ")
        self.status = int(first[1]) if first else None
        lines = head.decode(errors="replace").split("\r\n")[1:]
        self.headers = {key.lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
        self.body = unchunked(rest) if self.headers.get("transfer-encoding") == "chunked" else rest


def unchunked(data):
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size or b"0", 16)
        out, data = out + data[:count], data[count + 2 :]
    return out


class Campaign:
    def __init__(self, place):
        self.place, self.server = place, None
        text_run(place, "run", steps=8)
        self.template = place / "run/chat_template.jinja"
        self.template.write_text(TEMPLATE)
        self.start()

    def start(self):
        self.server = start(["serve", "run", "--port", "0", "--max-batch", "4", "--max-queue", "16"], self.place)
        line = self.server.stdout.readline().decode()
        found = re.search(r" at http://127\.0\.0\.1:(\d+)/v1$", line.strip())
        if not found:
            raise Broken("starting", f"the server says {line!r}: {finish(self.server, 10).err[-300:]!r}")
        self.port, self.at_first = int(found[1]), self.most_memory()

    def most_memory(self):
        status = pathlib.Path(f"/proc/{self.server.pid}/status")
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) * 1024 if self.server.poll() is None else 0

    def send(self, data, half_close=False, pieces=1, hang_up=None):
        """The answer, or None where `hang_up` says after how many seconds to leave without it."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS) as connection:
            step = -(-len(data) // pieces) or 1
            try:
                for at in range(0, len(data), step):
                    connection.sendall(data[at : at + step])
                    if pieces > 1:
                        time.sleep(0.002)
                if half_close:
                    with contextlib.suppress(OSError):  # where the other side has closed already
                        connection.shutdown(socket.SHUT_WR)
                if hang_up is not None:
                    select.select([connection], [], [], hang_up)
                    return None
                received = b""
                while part := connection.recv(1 << 16):
                    received += part
            except ConnectionError:
                return Answer(b"")
            return Answer(received)

    def judged(self, what, answer):
        """Raises Broken unless the answer is one that the interface has."""
        if answer.status is None:
            raise Broken(what, f"no answer: {answer.data[:200]!r}")
        kind = answer.headers.get("content-type", "")
        if answer.status >= 400:
            try:
                error = json.loads(answer.body)["error"]
                message = error["message"]
            except (ValueError, KeyError, TypeError):
                raise Broken(what, f"status {answer.status} without an error: {answer.body[:300]!r}") from None
            wrong = fault(message)
            if wrong:
                raise Broken(what, wrong)
            if answer.status >= 500 and answer.status != 503:
                raise Broken(what, f"status {answer.status}: {message}")
        elif kind == "text/event-stream":
            events = [line for line in answer.body.decode().split("\n") if line]
            if not events or events[-1] != "data: [DONE]" or not all(json.loads(e.removeprefix("data: ")) for e in events[:-1]):
                raise Broken(what, f"a broken stream: {answer.body[-300:]!r}")
        elif kind.startswith("application/json"):
            try:
                json.loads(answer.body)
            except ValueError:
                raise Broken(what, f"status {answer.status} with broken JSON: {answer.body[:300]!r}") from None

    def templates(self, random):
        """A server of its own with a damaged chat template."""
        what = "damaged chat templates"
        self.close()
        self.template.write_bytes(mutate("jinja", TEMPLATE.encode(), random))
        try:
            self.start()
            answer = self.send(request("POST", "/v1/chat/completions", json.dumps(CHAT).encode()))
            self.judged(what, answer)
            self.plain(what)
        except OSError as error:
            raise Broken(what, f"{type(error).__name__}: {error}, {self.server.poll()}") from None
        finally:
            self.close()
            self.template.write_text(TEMPLATE)
            self.start()
        return what

    def case(self, number, random):
        if number % 100 == 99:
            return self.templates(random)
        way = random.randrange(10)
        method, path, body = ("POST", "/v1/completions", random.choice(BODIES)) if random.random() < 0.8 else random.choice(OTHERS)
        data = b"" if body is None else json.dumps(body).encode()
        sending, well_formed, what = {}, True, "requests with a damaged body"
        if way < 4:
            data = change_json(data, random) if data else data
        elif way == 4:
            data = random.choice(BLIND)(data, random)
        elif way == 5:
            data = swap_number(data, random)
        elif way == 6 and isinstance(body, dict):
            what = "requests that ask for much"
            key = random.choice(["n", "best_of", "max_tokens", "logprobs", "top_k", "seed", "prompt", "stop"])
            much = {"prompt": [[1] * 4] * random.choice([17, 3000]), "stop": ["s" * random.choice([1, 100000])] * 64}
            data = json.dumps({**body, key: much.get(key, random.choice(NUMBERS))}).encode()
        elif way == 7:
            what, sending = "clients that hang up", {"hang_up": random.choice([0, 0.01, 0.1])}
        elif way == 8:
            what = "clients that close half or send slowly"
            sending = {"half_close": random.random() < 0.5, "pieces": random.choice([1, 5, 40])}
        raw = request(method, path, data[: 1 << 22])
        if way == 9:
            what, well_formed = "requests with a damaged head", False
            raw = mutate("text", raw, random)[: 1 << 20]
            sending = {"half_close": True}
        (self.place / "request.bin").write_bytes(raw)
        try:
            answer = self.send(raw, **sending)
            if answer is not None and well_formed:
                self.judged(what, answer)
            if json.loads(self.send(request("GET", "/health")).body)["status"] != "ok":
                raise Broken(what, "the server is not well afterwards")
            if number % 20 == 0:
                self.plain(what)
        except (OSError, ValueError, KeyError) as error:
            self.fallen(what, f"{type(error).__name__}: {error}")
        if self.server.poll() is not None:
            self.fallen(what, "it ended")
        if self.most_memory() > self.at_first + ROOM:
            self.at_first = self.most_memory()
            raise Broken(what, f"the server's memory grew to {self.most_memory() >> 20} MiB")
        return what

    def plain(self, what):
        answer = self.send(request("POST", "/v1/completions", json.dumps(BODIES[0]).encode()))
        self.judged(what, answer)
        if answer.status != 200:
            raise Broken(what, f"a plain request gets {answer.status}: {answer.body[:200]!r}")

    def fallen(self, what, message):
        """The server does not answer: says so, and starts another."""
        code = self.server.poll()
        ended = "" if code is None else f", exit code {code}"
        if code is not None and code < 0:
            ended = f", {signal.Signals(-code).name}"
        self.close()
        self.start()
        raise Broken(what, f"the server does not answer ({message}{ended})")

    def close(self):
        if self.server is not None:
            self.server.kill()
            self.server.communicate()
