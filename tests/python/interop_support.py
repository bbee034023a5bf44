"""What the tests of import and export share."""

import json

import pytest
import torch
from cli_support import BINARY, run
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

MARK = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")
COMMON = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **options}))


def headloom(*arguments, code=0):
    done = run(*arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def shaken(model):
    """Norms, biases and decays away from where they start, so that a mixed-up one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def saved(make, folder):
    torch.manual_seed(2)
    model = shaken(make())
    model.save_pretrained(folder)
    return model


def logits_of(run, text, *more):
    out = run / "logits.safetensors"
    headloom("eval", run, "--set", f"task.paths=['{text}']", "--set", "task.length=40", "--sequences", 1, "--logits", out, *more)
    return load_file(out)


def compare_with(reference, config, weights, tmp_path, text, file="model.safetensors", config_file="config.json"):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / config_file).write_text(json.dumps(config))
    if file == "model.safetensors":
        save_file(weights, tmp_path / "theirs" / file, {"format": "pt"})
    else:
        torch.save(weights, tmp_path / "theirs" / file)
    headloom("import", tmp_path / "theirs", "--out", tmp_path / "run")
    ours = logits_of(tmp_path / "run", text)
    with torch.no_grad():
        theirs = reference(ours["tokens"][:2])
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours["logits"][:2], theirs, atol=1e-4, rtol=0)


def refused(folder, tmp_path, code=1):
    message = headloom("import", folder, "--out", tmp_path / "never", code=code)
    assert message.startswith("headloom: ") and message.count("\n") == 1, message
    return message
