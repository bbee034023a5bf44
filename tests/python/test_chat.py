"""Chats: templates as jinja2 and transformers render them, and /v1/chat/completions over real HTTP."""

import json

import pytest

from chat_templates import CONVERSATIONS, ENDLESS, NAMES, PIECES, TEMPLATES, UNSUPPORTED
from test_serve import BINARY, CORPUS, TASK, ATTENTION, headloom, serving

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<s>"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the run `chat`, whose tokenizer has a template."""
    folder = tmp_path_factory.mktemp("chat")
    (folder / "corpus.txt").write_text(CORPUS * 60)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|end|>", "chat_template": TEMPLATES["chatml"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    task = TASK.replace("length = 48", 'length = 200\ntokenizer = "tokenizer.json"')
    task = task.replace("eval_tokens = 480", "eval_tokens = 600").replace("steps = 60", "steps = 8")
    (folder / "chat.toml").write_text(ATTENTION + task)
    headloom("train", "chat.toml", "--out", "chat", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def chat(place):
    with serving("chat", place, "--max-batch", 4) as server:
        yield server


@pytest.fixture(scope="module")
def theirs(place):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(place / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>", chat_template=TEMPLATES["chatml"]
    )


def asked(server, path="/v1/chat/completions", status=200, **body):
    found, answer = server.ask("POST", path, body)
    assert found == status, answer
    return answer if status == 200 else answer["error"]


def with_template(place, template, name="chat_template.jinja"):
    """A copy of the run with another template."""
    import shutil

    run = place / "other"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(place / "chat", run)
    if template is not None:
        (run / name).write_text(template)
    return run


def literal(value):
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    return "none" if value is None else repr(value)


def test_templates_are_rendered_as_transformers_does(place):
    cases = [*TEMPLATES.values(), *PIECES]
    given = "".join("{%- set " + name + " = " + literal(value) + " -%}" for name, value in NAMES.items())
    whole = given + "{%- set which = messages[0].name -%}{% if false %}"
    whole += "".join("{% elif which == '" + str(i) + "' %}" + case for i, case in enumerate(cases)) + "{% endif %}"
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(place / "tokenizer.json"), bos_token="<s>", eos_token="<|im_end|>", pad_token="<|end|>", chat_template=whole
    )
    errors = 0
    with serving(with_template(place, whole), place) as server:
        for i, case in enumerate(cases):
            conversations = CONVERSATIONS if i < len(TEMPLATES) else {"one": CONVERSATIONS["one"]}
            for name, messages in conversations.items():
                messages = [{**messages[0], "name": str(i)}, *messages[1:]]
                status, ours = server.ask("POST", "/apply-template", {"messages": messages})
                try:
                    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                except Exception as error:
                    errors += 1
                    assert status == 400, (case, name, ours, error)
                    if "raise_exception" in case:
                        assert str(error) in ours["error"]["message"] and ours["error"]["param"] == "messages"
                    continue
                assert status == 200, (case, name, ours)
                assert ours["prompt"] == expected, (case, name)
    assert errors >= 20


@pytest.mark.parametrize("template", [*UNSUPPORTED, *ENDLESS])
def test_what_a_template_may_not(place, template):
    with serving(with_template(place, template), place) as server:
        error = asked(server, status=400, messages=CONVERSATIONS["one"])
        assert "chat_template.jinja: the chat template cannot be used" in error["message"] and ": line 1: " in error["message"]
        assert UNSUPPORTED.get(template, "") in error["message"] and "\n" not in error["message"]
        assert server.complete(prompt="a", max_tokens=1)["choices"]


def test_an_answer(chat, theirs):
    messages = CONVERSATIONS["turns"]
    prompt = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    prompt = prompt if isinstance(prompt, list) else prompt["input_ids"]
    options = {"max_tokens": 9, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    answer = asked(chat, messages=messages, model="chat", user="me", **options)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-") and answer["model"] == "chat"
    plain = chat.complete(prompt=prompt, max_tokens=9, temperature=0, logprobs=2)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": plain["choices"][0]["text"], "refusal": None}
    assert choice["index"] == 0 and choice["finish_reason"] == plain["choices"][0]["finish_reason"]
    assert answer["usage"] == plain["usage"] and answer["usage"]["prompt_tokens"] == len(prompt)
    said = choice["logprobs"]["content"]
    assert [t["logprob"] for t in said] == plain["choices"][0]["logprobs"]["token_logprobs"]
    for token in said:
        assert token["token"] == bytes(token["bytes"]).decode(errors="replace")
        assert len(token["top_logprobs"]) == 2 and token["top_logprobs"][0]["logprob"] >= token["top_logprobs"][1]["logprob"]
    # Samples, stop strings, the newer name of max_tokens, parts of a content.
    two = asked(chat, messages=messages, n=2, seed=3, max_completion_tokens=7)["choices"]
    assert len(two) == 2 and two == asked(chat, messages=messages, n=2, seed=3, max_tokens=7)["choices"]
    text = choice["message"]["content"]
    if len(text) > 2:
        stopped = asked(chat, messages=messages, **options, stop=text[1:3])["choices"][0]
        assert stopped["message"]["content"] == text[: text.index(text[1:3])] and stopped["finish_reason"] == "stop"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert asked(chat, "/apply-template", messages=parts) == asked(
        chat, "/apply-template", messages=[{"role": "user", "content": "a\nb"}]
    )
    # An answer can be sent back as it came, also with the keys that OpenAI's client adds to it.
    back = [*messages, choice["message"], {"role": "user", "content": "a"}]
    more = dict.fromkeys(["annotations", "audio", "function_call", "tool_calls"])
    plain = asked(chat, "/apply-template", messages=[*messages, {"role": "assistant", "content": text}, back[-1]])
    assert asked(chat, "/apply-template", messages=back) == plain
    assert asked(chat, "/apply-template", messages=[*messages, {**choice["message"], **more}, back[-1]]) == plain
    # Without max_tokens an answer ends with the turn or with the length.
    assert asked(chat, messages=messages)["usage"]["total_tokens"] <= 200


def test_a_sentencepiece_model_has_the_tokens_that_its_configuration_adds(tmp_path):
    (tmp_path / "corpus.txt").write_text(CORPUS * 60)
    headloom("vocabulary", "corpus.txt", "--size", 300, "--out", "tokenizer.model", cwd=tmp_path)
    added = {"297": {"content": "<|user|>", "rstrip": True}, "298": {"content": "<|end|>", "lstrip": True}, "299": {"content": "<|end|>!"}}
    template = "{{ bos_token }}{% for m in messages %}<|user|>\n{{ m.content }} <|end|>{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added, "chat_template": template}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(3, 300))}))
    task = TASK.replace("length = 48", 'length = 200\ntokenizer = "tokenizer.model"')
    task = task.replace("eval_tokens = 480", "eval_tokens = 600").replace("steps = 60", "steps = 1")
    (tmp_path / "chat.toml").write_text(ATTENTION + task)
    headloom("train", "chat.toml", "--out", "chat", cwd=tmp_path)

    def tokens(text):
        return json.loads(headloom("tokenize", "tokenizer.model", "--json", cwd=tmp_path, input=json.dumps(text).encode() + b"\n").stdout)["tokens"]

    with serving("chat", tmp_path) as server:
        messages = [{"role": "user", "content": "the word"}, {"role": "user", "content": "</s> a<|end|>!b"}]
        expected = [297, *tokens("the word"), 298, 297, 1, *tokens(" a"), 299, *tokens("b"), 298]
        options = {"temperature": 0, "logprobs": True, "max_tokens": 1}
        answer = asked(server, messages=messages, **options)
        assert answer["usage"]["prompt_tokens"] == len(expected)
        plain = server.complete(prompt=expected, temperature=0, logprobs=0, max_tokens=1)["choices"][0]
        said = answer["choices"][0]
        # Here any token but the first three ends an answer.
        assert said["finish_reason"] == "stop" and said["message"]["content"] == ""
        assert plain["finish_reason"] == "length"


def test_a_stream(chat):
    body = {"messages": CONVERSATIONS["turns"], "n": 2, "seed": 5, "max_tokens": 12, "logprobs": True}
    whole = asked(chat, **body)
    with chat.open(path="/v1/chat/completions", stream=True, stream_options={"include_usage": True}, **body) as connection:
        events = connection.getresponse().read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    texts, finishes, logprobs, roles = [""] * 2, [None] * 2, [[], []], [None] * 2
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk" and chunk["id"] == last["id"] and chunk["usage"] is None
        (choice,) = chunk["choices"]
        i, delta = choice["index"], choice["delta"]
        assert finishes[i] is None
        assert ("role" in delta) == (roles[i] is None)
        roles[i] = delta.get("role", roles[i])
        texts[i] += delta.get("content", "")
        logprobs[i] += (choice["logprobs"] or {"content": []})["content"]
        finishes[i] = choice["finish_reason"]
    assert roles == ["assistant"] * 2
    assert texts == [c["message"]["content"] for c in whole["choices"]]
    assert finishes == [c["finish_reason"] for c in whole["choices"]]
    assert logprobs == [c["logprobs"]["content"] for c in whole["choices"]]


def test_refusals(chat):
    user = [{"role": "user", "content": "a"}]
    for body, param, message in [
        ({}, "messages", "'messages' is missing, expected a list of 1 to 4096 messages"),
        ({"messages": []}, "messages", "'messages' is [], expected a list of 1 to"),
        ({"messages": "hello"}, "messages", "'messages' is \"hello\", expected a list"),
        ({"messages": [1]}, "messages[0]", "'messages[0]' is 1, expected an object"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "'messages[0].role' is missing or null, expected a text"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "'messages[0].content' is missing or null, expected a text or a list"),
        ({"messages": [{"role": "user", "content": "a", "rôle": 1}]}, None, "unknown key "),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls",
            "'messages[0].tool_calls' is [{\"id\":\"1\"}], expected it to be absent or null.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "messages[0].content",
            "'messages[0].content' has a part of type \"image_url\", expected \"text\".",
        ),
        ({"messages": user * 5000}, None, "'messages' is a list of 5000, expected a list of 1 to 4096"),
        ({"messages": user, "n": 30_000_000}, "n", "'n' is 30000000, expected an integer from 1 to 4,"),
        ({"messages": user, "max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "'max_completion_tokens' and"),
        ({"messages": user, "top_logprobs": 2}, "top_logprobs", "'top_logprobs' needs 'logprobs' to be true."),
        ({"messages": user, "logprobs": 2}, "logprobs", "'logprobs' is 2, expected true or false."),
        ({"messages": user, "tools": [{"type": "function"}]}, "tools", "'tools' is not supported"),
        ({"messages": user, "response_format": {"type": "json_object"}}, "response_format", "'response_format' is not supported"),
        ({"messages": user, "prompt": "a"}, None, "unknown key \"prompt\""),
    ]:
        error = asked(chat, status=400, **body)
        assert error["message"].startswith(message) and "\n" not in error["message"]
        assert param is None or error["param"] == param
    long = asked(chat, status=400, messages=[{"role": "user", "content": "word " * 500}])
    assert long["code"] == "context_length_exceeded"
    long = asked(chat, status=400, messages=user, max_completion_tokens=5000)
    assert long["code"] == "context_length_exceeded" and " and max_completion_tokens is 5000, together more" in long["message"]


def test_where_a_template_comes_from(place):
    user = [{"role": "user", "content": "a"}]

    def spelled(template, name):
        with serving(with_template(place, template, name), place) as server:
            return asked(server, "/apply-template", messages=user)["prompt"]

    config = lambda chat_template: json.dumps({"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": chat_template})
    # A file of its own comes before the configuration; of a list the one called default is taken.
    assert spelled("own {{ bos_token }}{{ eos_token }}", "chat_template.jinja") == "own <s><|im_end|>"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d {{ messages[0].content }}"}]
    assert spelled(config(named), "tokenizer_config.json") == "d a"

    def missing(template, name="tokenizer_config.json"):
        with serving(with_template(place, template, name), place) as server:
            error = asked(server, status=400, messages=user)
            assert error["type"] == "invalid_request_error" and error["code"] == "no_chat_template"
            assert server.complete(prompt="a", max_tokens=1)["choices"]
            return error["message"]

    assert "other has neither chat_template.jinja nor a tokenizer_config.json with" in missing("{}")
    assert "'chat_template' is a list of 1, expected a text or a list of" in missing(config(named[:1]))
    assert "tokenizer_config.json: is not a JSON object." in missing("[")
    assert "line 2: expected a value, found the end of the tag" in missing("\n{{ }}", "chat_template.jinja")
