"""Other devices than the CPU, on a machine that has none, or on the real one that HEADLOOM_TEST_DEVICE names ("cuda").

Each part is a process of its own, a fork of one that has imported torch. PyTorch's fake tensors say they are on CUDA; an autograd node on
one would end the process. The guarded device (tests/testing/device/guarded_device.h) computes in memory that the host cannot read.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from cli_support import BINARY, run

HERE = pathlib.Path(__file__).resolve().parent
LIBRARY = HERE.parents[1] / "build" / "lib" / "libheadloom_test_device.so"
DEVICE = os.environ.get("HEADLOOM_TEST_DEVICE") or "guarded:1"
GUARDED = DEVICE.startswith("guarded")


def missing():
    """Why there is nothing to test on; empty where there is."""
    if GUARDED:
        return "" if LIBRARY.exists() else f"{LIBRARY} is not built"
    there = DEVICE.split(":")[0] != "cuda" or torch.cuda.is_available()
    return "" if there else f"HEADLOOM_TEST_DEVICE is {DEVICE}, but this machine or this PyTorch has no CUDA"


needs_device = pytest.mark.skipif(bool(missing()), reason=missing() or "it is there")
needs_binary = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")

FAKE = """
import headloom
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from test_operator_arguments import operators

def away(t):
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")

def flat(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)

with torch.no_grad():
    names = set()
    for name, tensors, others in operators():
        call = getattr(headloom.ops, name)
        expected = flat(call(**tensors, **others))
        with FakeTensorMode() as mode:
            there = {key: away(t) for key, t in tensors.items()}
            found = flat(call(**there, **others))
            assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected], name
            assert all(str(t.device) == "cuda:0" for t in found), (name, [t.device for t in found])
            # A tensor on another device is neither taken nor moved.
            for key in list(there)[1:2]:
                try:
                    call(**{**there, key: torch.empty_like(there[key], device="cpu")}, **others)
                except (ValueError, RuntimeError) as error:
                    assert key in str(error) or "device" in str(error), (name, key, error)
                else:
                    raise AssertionError(f"{name} took {key} on the CPU")
        names.add(name)
    assert len(names) >= 15, names

    # Autocast casts on every device what it casts on the CPU.
    cast = 0
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("headloom::"):
            keys = [f"Autocast{kind}" for kind in ("CPU", "CUDA", "XPU", "MPS", "PrivateUse1")]
            found = {torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, key) for key in keys}
            assert len(found) == 1, schema.name
            cast += found.pop()
    assert cast >= 10, cast

    # Whole models: every token mixer.
    forward = 0
    for name in headloom.mixers():
        both_ways = name in ("fnet", "linformer")
        kind = dict(kind="encoder") if both_ways else {}
        model = headloom.model(width=32, depth=1, vocabulary=30, max_length=16, layer=[{"mixer": {"type": name}}], **kind)
        held = model.eval().state_dict()
        with FakeTensorMode():
            tensors = {key: away(t) for key, t in held.items()}
            tokens = torch.empty(2, 8, dtype=torch.int64, device="cuda")
            logits = torch.func.functional_call(model, tensors, (tokens,))
            assert logits.shape == (2, 8, 30) and str(logits.device) == "cuda:0", name
        forward += 1
    assert forward >= 14, forward
print("passed")
"""

MODELS = """
import sys
import types
import warnings

import headloom
import torch
from headloom._scoring import log_likelihoods

name, folder, library = sys.argv[1:]
if library:
    torch.ops.load_library(library)
    module = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, current_device=lambda: 0, _is_in_bad_fork=lambda: False, manual_seed_all=lambda seed: None,
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float32],
    )
    torch._register_device_module("guarded", module)
device = torch.device(name if ":" in name else name + ":0")
torch.backends.cudnn.allow_tf32 = False

def there(t):
    return t.to(device)

def train(model, tokens, steps=3):
    optimizer = torch.optim.AdamW(headloom.parameter_groups(model), lr=1e-2)
    losses = []
    for step in range(steps):
        loss = model.loss(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        headloom.balance_experts(model)
        headloom.redraw_features(model, step + 1)
        losses.append(loss.item())
    return losses

torch.manual_seed(2)
tokens = torch.randint(0, 30, (2, 12))
layers = {
    "dcmha": {"mixer": {"type": "dcmha", "heads": 4}},
    "gla": {"mixer": {"type": "gla", "heads": 4}},
    "performer": {
        "mixer": {"type": "performer", "heads": 4, "redraw": 2},
        "channel": {"type": "moe", "routed": 4, "active": 2, "hidden": 16, "bias_speed": 0.01},
    },
}
for name, layer in layers.items():
    torch.manual_seed(3)
    here = headloom.model(width=32, depth=2, vocabulary=30, max_length=40, layer=[layer])
    torch.manual_seed(3)
    away = headloom.model(width=32, depth=2, vocabulary=30, max_length=40, layer=[layer]).to(device)
    expected, found = train(here, tokens), train(away, there(tokens))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-3)
    assert all(p.device == device for p in away.parameters()), name
    here.load_state_dict({key: t.cpu() for key, t in away.state_dict().items()})
    here.eval(), away.eval()
    with torch.no_grad():
        torch.testing.assert_close(away(there(tokens)).cpu(), here(tokens), rtol=1e-3, atol=1e-4)
        with torch.autocast(device.type, torch.bfloat16):
            narrow = away(there(tokens))
        assert narrow.dtype == torch.bfloat16, (name, narrow.dtype)
        torch.testing.assert_close(narrow.float().cpu(), here(tokens), rtol=0.1, atol=0.1)
    # The same text, whichever device the prompt is on.
    prompt = tokens[:, :4]
    with warnings.catch_warnings():
        if library:  # what a real device's own kernels warn of is their matter
            warnings.simplefilter("error")
        texts = [m.generate(p, 20, seed=5) for m, p in ((here, prompt), (away, prompt), (away, there(prompt)))]
    assert texts[2].device == device and texts[1].device.type == "cpu"
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2].cpu()), name
    states = [headloom.State(), headloom.State()]
    pieces = [m.extend(p, s) for m, p, s in ((here, tokens, states[0]), (away, there(tokens), states[1]))]
    torch.testing.assert_close(pieces[1].cpu(), pieces[0], rtol=1e-3, atol=1e-4)
    pairs = [([1, 2, 3], [4, 5]), ([6], [7])]
    scores = [[score for score, _ in log_likelihoods(m, pairs)] for m in (here, away)]
    torch.testing.assert_close(torch.tensor(scores[1]), torch.tensor(scores[0]), rtol=1e-3, atol=1e-3)
    two = states[1].select(torch.tensor([1, 1, 0]))
    assert away.extend(there(tokens[[1, 1, 0], :1]), two).device == device
    assert headloom.analysis.params(away).found
    away.save(folder + "/" + name)
    torch.testing.assert_close(headloom.load(folder + "/" + name)(tokens), here(tokens))

found = headloom.analysis.diversity(
    headloom.model(width=32, depth=1, vocabulary=30, max_length=40, layer=[layers["dcmha"]]).to(device), tokens
)
assert found.arrays
# The page of maps shows the tokens.
headloom.analysis.maps(
    headloom.model(width=32, depth=1, vocabulary=30, max_length=40, layer=[layers["dcmha"]]).to(device), there(tokens)
)
# A tensor on another device is refused by name.
try:
    away(tokens)
except ValueError as error:
    assert f"tokens is on cpu, but the parameters are on {device}" in str(error), error
else:
    raise AssertionError("tokens on the CPU were taken")
print("passed")
"""


# Runs each of its arguments, which are pieces of Python and their sys.argv, in a fork. A line for each: how it ended.
FORKS = """
import json
import os
import sys
import traceback

import headloom
import test_operator_arguments
import torch

for code, *arguments in json.loads(sys.argv[1]):
    process = os.fork()
    if process == 0:
        sys.argv[1:] = arguments
        try:
            exec(code, {"__name__": "part"})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    print("ended", os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the parts say, and the errors of all."""
    parts = [(FAKE,)]
    if not missing():
        parts.append((MODELS, DEVICE, str(tmp_path_factory.mktemp("models")), str(LIBRARY) if GUARDED else ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FORKS, json.dumps(parts)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines(), done.stderr[-6000:]


def passes(said, part):
    lines, errors = said
    ends = [i for i, line in enumerate(lines) if line.startswith("ended ")]
    assert lines[ends[part]] == "ended 0" and lines[ends[part] - 1] == "passed", errors


CONFIG = """
[model]
width = 32
depth = 1
[[model.layer]]
mixer = { type = 'dcmha', heads = 4 }
[task]
type = 'text'
paths = ['%s']
length = 32
eval_tokens = 128
[train]
steps = 4
batch = 4
"""


@needs_device
@needs_binary
def test_commands_run_on_another_device(tmp_path, text):
    # The program finds the device as it finds PyTorch's own: in a library that is loaded.
    environment = {**os.environ, **({"LD_PRELOAD": str(LIBRARY)} if GUARDED else {})}

    def says(*arguments):
        command = [str(BINARY), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "run.toml").write_text(CONFIG % text)
    says("train", "run.toml", "--out", "run", "--device", DEVICE)
    assert f"device = '{DEVICE}'" in (tmp_path / "run" / "config.toml").read_text()
    here, away = (json.loads(says("eval", "run", "--json", "--device", name)) for name in ("cpu", DEVICE))
    assert away["loss"] == pytest.approx(here["loss"], abs=1e-4)
    narrow = says("eval", "run", "--json", "--device", DEVICE, "--quantize", "int4", "--cache", "tova:9")
    assert json.loads(narrow)["costs"] == pytest.approx(0, abs=0.05)
    written = [says("generate", "run", "--prompt=a", "--tokens=8", "--device", name) for name in ("cpu", DEVICE)]
    assert written[0] == written[1]
    assert json.loads(says("analyze", "run", "maps", "--json", "--device", DEVICE))["tables"] is not None


@needs_binary
def test_a_device_that_is_not_there_is_refused_first():
    for command in ("eval", "serve"):
        done = run(command, "nowhere", "--device", "xpu:7")
        expected = '--device is "xpu:7", but this machine or this build of PyTorch has no XPU device.'
        assert done.returncode == 2 and expected in done.stderr, (command, done.stderr)


def test_operators_and_models_run_on_fake_cuda_tensors(said):
    passes(said, 0)


@needs_device
def test_models_run_on_another_device(said):
    passes(said, 1)
