"""Small trainings, and what must be the same of two that were disturbed differently."""

import json

from program import Broken, expect

CORPUS = "The quick brown fox jumps over the lazy dog. Straße, 3 €, 😀!\n"
MODEL = """
[model]
width = 16
depth = 2
dropout = 0.1
"""
TRAIN = """
[train]
batch = 8
warmup = 2
"""
COPY = 'type = "copy", symbols = 8, count = 8, eval_sequences = 8'
LAYER = """
[[model.layer]]
mixer = { type = "mha", heads = 2 }
channel = { type = "swiglu", hidden = 16 }
"""


def corpus(place):
    (place / "corpus.txt").write_text(CORPUS * 60)


def train_config(place, steps=60):
    """A training on generated text that takes half a second or so and saves every second step."""
    rest = f"steps = {steps}\neval_every = 10\ncheckpoint_every = 2\n"
    (place / "train.toml").write_text(MODEL + LAYER + f"[task]\n{COPY.replace(', ', chr(10))}\n" + TRAIN + rest)
    return place / "train.toml"


def compare_config(place, steps=16):
    """Two models and two seeds, so four runs."""
    models = "".join(f'[[models]]\nname = "{name}"\nmixer = {{ type = "{name}", heads = 2 }}\n' for name in ["mha", "retention"])
    task = f'[[tasks]]\nname = "copy"\ntask = {{ {COPY} }}\n'
    rest = f"steps = {steps}\neval_every = 8\ncheckpoint_every = 2\n"
    (place / "compare.toml").write_text("title = 'soak'\nseeds = [1, 2]\n" + MODEL + TRAIN + rest + models + task)
    return place / "compare.toml"


def text_run(place, name="text", more="", steps=4):
    """A finished run on text, which can write."""
    corpus(place)
    config = MODEL + LAYER + f'[task]\ntype = "text"\npaths = ["corpus.txt"]\nlength = 32\neval_tokens = 256\n{more}\n' + TRAIN
    (place / f"{name}.toml").write_text(config + f"steps = {steps}\n")
    expect("preparing", ["train", f"{name}.toml", "--out", name], place)
    return place / name


def figures(run):
    """metrics.jsonl without times and memory, which differ; each step must be there once."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for kind in ("loss", "eval_loss"):
        steps = [line["step"] for line in lines if kind in line]
        if sorted(set(steps)) != steps:
            raise Broken("metrics", f"{path.name} has the steps of '{kind}' {steps}, expected each once and in order")
    return [{key: value for key, value in line.items() if key != "ranks" and not key.endswith("seconds")} for line in lines]


def last_checkpoint(run):
    folders = [p for p in (run / "checkpoints").glob("step-*") if p.name[5:].isdigit()]
    return max(folders, key=lambda p: int(p.name[5:]), default=None)


def weights(run):
    """The bytes of the last checkpoint's tensors."""
    folder = last_checkpoint(run)
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.safetensors"))} if folder else {}


def runs_below(folder):
    return sorted(path.parent for path in folder.rglob("metrics.jsonl"))


def same_end(what, disturbed, whole):
    """Raises Broken unless every run below one folder ended bit for bit as that of the other."""
    names = [[run.relative_to(folder) for run in runs_below(folder)] for folder in (disturbed, whole)]
    if names[0] != names[1] or not names[0]:
        raise Broken(what, f"the runs are {list(map(str, names[0]))}, expected {list(map(str, names[1]))}")
    for name in names[0]:
        try:
            if figures(disturbed / name) != figures(whole / name):
                raise Broken(what, f"metrics.jsonl of {name} differs from an undisturbed run's")
        except Broken as broken:
            raise Broken(what, str(broken)) from None
        a, b = weights(disturbed / name), weights(whole / name)
        if a != b:
            raise Broken(what, f"the last checkpoint of {name} differs from an undisturbed run's")
