"""Reads damaged files inside one Python process, many cases after each other; files.py starts it.

A line of JSON on the standard input is a case, a line of JSON on the standard output says how it ended. What a case does to
the process, to end it even, is the other side's to notice.
"""

import json
import os
import pathlib
import resource
import sys
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

import headloom  # noqa: E402
import torch  # noqa: E402

ROOM = 3 << 30  # of memory, beyond what is mapped when it begins


def toml(path):
    torch.ops.headloom.model_spec(pathlib.Path(path).read_bytes())


def model(path):
    """A run or a Hugging Face folder, and two tokens from it."""
    loaded = headloom.load(path)
    if loaded.config["kind"] == "decoder":
        loaded.generate(torch.tensor([1, 2, 3]), 2, temperature=0)


def tokenizer(path):
    """A tokenizer, and what is beside it as text.bin, there and back."""
    read = headloom.Tokenizer(path)
    tokens = read.encode((pathlib.Path(path).parent / "text.bin").read_bytes())
    if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < read.vocabulary:
        raise AssertionError(f"tokens from {int(tokens.min())} to {int(tokens.max())} in a vocabulary of {read.vocabulary}")
    read.decode(tokens)
    for token in {read.end_token, *([] if read.start_token is None else [read.start_token]), *tokens.tolist()[:50]}:
        read.piece(token)


def roundtrip(path):
    """Text of any bytes through a tokenizer that keeps all of them."""
    data = (pathlib.Path(path).parent / "text.bin").read_bytes()
    for name in ["bytes", path]:
        read = headloom.Tokenizer(name)
        back = b"".join(read.piece(token) for token in read.encode(data).tolist())
        if back.replace(b"\x00", b"") != data.replace(b"\x00", b""):  # a byte 0 ends a text
            raise AssertionError(f"{name} makes {back[:50]!r} of {data[:50]!r}")


def save_as_torch(path):
    """model.safetensors once more as torch.save writes it: material for other cases."""
    from safetensors.torch import load_file

    folder = pathlib.Path(path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")


READERS = {f.__name__: f for f in (toml, model, tokenizer, roundtrip, save_as_torch)}


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    mapped = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ROOM, mapped + ROOM))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        try:
            READERS[case["reader"]](case["path"])
            answer = {"ended": "read"}
        except Exception as error:  # judged by the other side
            answer = {"ended": "refused", "type": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


main()
