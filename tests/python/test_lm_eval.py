"""Scoring token sequences, and the adapter for lm-evaluation-harness."""

import copy
import importlib
import importlib.util
import json
import sys
import types

import headloom
import pytest
import torch
from headloom import _scoring


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(2)
    model = headloom.model(
        width=32,
        depth=2,
        tokenizer="bytes",
        max_length=24,
        layer=[{"mixer": {"type": "dcmha", "heads": 4}, "channel": {"type": "swiglu"}}],
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(5)
        # It writes letters.
        model.embedding[:97] = model.embedding[123:] = 0
    return model


@torch.no_grad()
def plainly(model, context, continuation):
    """One sequence by itself, a token at a time."""
    total, greedy = 0.0, True
    for i, token in enumerate(continuation):
        scores = model(torch.tensor([[*context, *continuation[:i]]]))[0, -1].log_softmax(-1)
        total += float(scores[token])
        greedy = greedy and int(scores.argmax()) == token
    return total, greedy


def test_log_likelihoods(model):
    context = list(b"hi")
    likeliest = model.generate(torch.tensor(context), 3, temperature=0)[2:].tolist()
    other = [*likeliest[:2], 3]
    pairs = [(list(b"a"), list(b"bcd")), (list(b"qwertyuiop"), list(b"x")), (context, likeliest), (context, other), (context, [])]
    found = _scoring.log_likelihoods(model, pairs, batch_size=2)
    for (value, greedy), pair in zip(found, pairs):
        expected, was_greedy = plainly(model, *pair)
        assert value == pytest.approx(expected, abs=1e-3) and greedy == was_greedy
    assert [greedy for _, greedy in found][2:] == [True, False, True]


def test_long_contexts_lose_their_oldest_tokens(model):
    context, continuation = [97 + i % 26 for i in range(40)], list(b"xy")
    (value, _), = _scoring.log_likelihoods(model, [(context, continuation)])
    assert value == pytest.approx(plainly(model, context[-23:], continuation)[0], abs=1e-3)
    with pytest.raises(ValueError, match="25 tokens, expected at most the model's 24"):
        _scoring.log_likelihoods(model, [([1], [2] * 25)])
    with pytest.raises(ValueError, match="no tokens"):
        _scoring.log_likelihoods(model, [([], [2])])


def test_rolling(model):
    torch.manual_seed(0)
    short, long = torch.randint(97, 123, (10,)).tolist(), torch.randint(97, 123, (60,)).tolist()
    assert _scoring.rolling_log_likelihood(model, short, 0) == pytest.approx(plainly(model, [0], short)[0], abs=1e-3)
    whole = [0, *long]
    expected = plainly(model, whole[:1], long[:24])[0] + plainly(model, whole[24:25], long[24:48])[0]
    expected += plainly(model, whole[36:49], long[48:])[0]  # the last window is full: 13 + 12 tokens, the last not read
    assert _scoring.rolling_log_likelihood(model, long, 0, batch_size=2) == pytest.approx(expected, abs=1e-3)
    assert _scoring.rolling_log_likelihood(model, [], 0) == 0


# --- With the harness ----------------------------------------------------------------------------


@pytest.fixture
def adapter(model):
    pytest.importorskip("lm_eval")
    import headloom.lm_eval

    return headloom.lm_eval.HeadloomLM(model, batch_size=2)


class Request:
    def __init__(self, *args):
        self.args = args


def test_requests(adapter, model):
    text = "abc de"
    (value, _), = adapter.loglikelihood([Request("abc", " de")])
    assert value == pytest.approx(plainly(model, list(b"abc"), list(b" de"))[0], abs=1e-3)
    (empty, _), = adapter.loglikelihood([Request("", text)])
    (rolling,) = adapter.loglikelihood_rolling([Request(text)])
    assert empty == pytest.approx(rolling, abs=1e-3)
    assert rolling == pytest.approx(plainly(model, [0], list(text.encode()))[0], abs=1e-3)


@pytest.fixture
def adapter_class(monkeypatch):
    """Also without the harness, of which this needs the names alone."""
    without = importlib.util.find_spec("lm_eval") is None
    if without:
        of_harness = {"model": dict(TemplateLM=object), "registry": dict(register_model=lambda name: lambda kind: kind)}
        for name, content in of_harness.items():
            monkeypatch.setitem(sys.modules, f"lm_eval.api.{name}", types.SimpleNamespace(**content))
        monkeypatch.setitem(sys.modules, "lm_eval", types.SimpleNamespace())
        monkeypatch.setitem(sys.modules, "lm_eval.api", types.SimpleNamespace())
    yield importlib.import_module("headloom.lm_eval").HeadloomLM
    if without:
        del sys.modules["headloom.lm_eval"]  # made of the names above


def test_arguments(adapter_class, model):
    """Those that lm_eval passes from its command line; others are refused, and not left out."""
    adapter = adapter_class(model, batch_size="auto:4", max_batch_size=3, device="cpu")
    assert adapter.batch_size == 3 and adapter_class(model, batch_size="auto").batch_size == 8
    with pytest.raises(TypeError, match="chekpoint"):
        adapter_class(model, chekpoint=2)
    copied = copy.deepcopy(model)
    assert next(adapter_class(copied, device="meta").model.parameters()).device.type == "meta"


def test_writing(adapter_class, model):
    adapter = adapter_class(model, batch_size=2)
    written = model.generate("abc", 6, temperature=0)[3:]
    options = {"until": ["\n\n\n"], "max_gen_toks": 6, "do_sample": False}
    assert adapter.generate_until([Request("abc", options)]) == [written]
    stopped = {"until": [written[3:4]], "max_gen_toks": 6}
    assert adapter.generate_until([Request("abc", stopped)]) == [written[: written.index(written[3])]]
    long = adapter.generate_until([Request("x" * 100 + "abc", options)])
    assert long == [model.generate("x" * 15 + "abc", 6, temperature=0)[18:]]
    # What may be written is longer than the model: half of it is left to the context.
    longer = {"until": ["\n\n\n"], "max_gen_toks": 30}
    (read,) = adapter.generate_until([Request("x" * 100 + "abcabc", longer)])
    assert read == model.generate("x" * 6 + "abcabc", 30, temperature=0)[12:]


def test_a_task(adapter, tmp_path):
    """A multiple choice, a perplexity and a generation, each in one local file."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = [{"question": "ab", "choices": ["c", "dd"], "answer": i % 2, "text": "abab c"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\ntest_split: test\n"
    tasks = {
        "choice": "output_type: multiple_choice\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n",
        "perplexity": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: byte_perplexity\n",
        "writing": "output_type: generate_until\ndoc_to_text: '{{question}}'\ndoc_to_target: '{{text}}'\n"
        "generation_kwargs:\n  max_gen_toks: 4\n  until: ['.']\nmetric_list:\n  - metric: exact_match\n",
    }
    for name, rest in tasks.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}\n{common}{rest}")
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate(adapter, tasks=list(tasks), task_manager=manager, bootstrap_iters=0)["results"]
    model = adapter.model
    scores = [plainly(model, list(b"ab"), list(b" " + c.encode()))[0] for c in ("c", "dd")]
    assert found["choice"]["acc,none"] == pytest.approx(0.5) and scores[0] != scores[1]
    total = plainly(model, [0], list(b"abab c"))[0]
    assert found["perplexity"]["byte_perplexity,none"] == pytest.approx(torch.tensor(-total / 6).exp().item(), rel=1e-3)
    assert found["writing"]["exact_match,none"] == 0
