"""Damaged files that the Python package reads, thousands of them in one process."""

import json
import select
import shutil
import signal
import subprocess
import sys
import time

from mutate import mutate
from program import ROOT, Broken, expect, fault
from training import CORPUS, LAYER, MODEL, text_run

DOC = "damaged configurations, checkpoints, weights, pickles and vocabularies, read inside the Python package"
SHARE = 3
SECONDS = 30  # a case may take
CASES = 1000  # of one process

# Python's own words for arguments; a message of any other type is somebody else's.
ERRORS = {"ValueError", "RuntimeError", "FileNotFoundError", "TypeError"}


class Worker:
    """A process of worker.py."""

    def __init__(self, place):
        self.errors = open(place / "worker.log", "w+")
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "tools/soaking/worker.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )
        self.cases = 0
        if self.process.stdout.readline() != "ready\n":
            raise Broken("preparing", f"headloom cannot be imported: {self.last_words()}")

    def last_words(self):
        self.errors.seek(0)
        return repr(self.errors.read()[-300:])

    def read(self, reader, path):
        self.cases += 1
        self.process.stdin.write(json.dumps({"reader": reader, "path": str(path)}) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return json.loads(line)
        if ready:
            code = self.process.wait()
            ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise Broken(reader, f"the process ended with {ended}: {self.last_words()}")
        raise Broken(reader, f"did not end within {SECONDS} s")

    def end(self):
        self.process.kill()
        self.process.communicate()
        self.errors.close()


def write_json(folder, file):
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(file))


def byte_level(place):
    """A tokenizer.json with byte-level BPE and all that such files have."""
    names = [chr(b) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or 0xAE <= b <= 0xFF else None for b in range(256)]
    others = iter(range(256))
    names = [name or chr(0x100 + next(others)) for name in names]
    merges = ["t h", "th e", "Ġ q", "Ġ the", "o x", "u i"]
    vocabulary = {name: i for i, name in enumerate(names + [m.replace(" ", "") for m in merges])}
    end = {"id": len(vocabulary), "content": "<|endoftext|>", "special": True, "normalized": False}
    added = {"id": len(vocabulary) + 1, "content": "fox", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True}
    split = {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|dog"}, "behavior": "Isolated", "invert": False}
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [end["id"]], "tokens": ["<|endoftext|>"]}},
    }
    file = {
        "version": "1.0",
        "added_tokens": [end, added],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {"type": "Digits", "individual_digits": True}, {"type": "ByteLevel"}]},
        "post_processor": {"type": "Sequence", "processors": [template]},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }
    write_json(place / "bpe", file)
    # And one that keeps every text as it is.
    file.update(added_tokens=[end], normalizer=None, pre_tokenizer={"type": "ByteLevel", "add_prefix_space": False})
    write_json(place / "plain", file)


def word_pieces(place):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "##es", "##s", ".", ",", "do", "##g", "3", "stra", "##ße"]
    special = [{"id": i, "content": word, "special": True} for i, word in enumerate(words[:5])]
    file = {
        "added_tokens": special,
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": {word: i for i, word in enumerate(words)},
        },
    }
    write_json(place / "words", file)


# Options of other mixers.
MANY = """
[[layer]]
mixer = { type = "multi_token", heads = 2, key_kernel = 3, query_kernel = 2, window = 8 }
channel = { type = "moe", routed = 4, shared = 1, active = 2, hidden = 8 }
[[layer]]
mixer = { type = "retention", heads = 2 }
[position]
type = "rope"
base = 10000.0
"""

# Folder, the file in it that is damaged, how, and what reads it ("" for the folder itself).
TARGETS = [
    ("spec", "spec.toml", "toml", "toml"),
    ("run", "config.toml", "toml", "model"),
    ("run", "checkpoints/step-4/state.json", "state", "model"),
    ("run", "checkpoints/step-4/model.safetensors", "safetensors", "model"),
    ("hf", "config.json", "json", "model"),
    ("hf", "model.safetensors", "safetensors", "model"),
    ("sharded", "model.safetensors.index.json", "json", "model"),
    ("pickled", "pytorch_model.bin", "zip", "model"),
    ("bpe", "tokenizer.json", "json", "tokenizer"),
    ("words", "tokenizer.json", "json", "tokenizer"),
    ("pieces", "tokenizer.model", "protobuf", "tokenizer"),
    ("plain", "text.bin", "text", "roundtrip"),
    ("bpe", "text.bin", "text", "tokenizer"),
    ("words", "text.bin", "text", "tokenizer"),
    ("pieces", "text.bin", "text", "tokenizer"),
]


class Campaign:
    def __init__(self, place):
        self.place, self.originals, self.worker = place, place / "originals", None
        self.originals.mkdir()
        text_run(self.originals, "run")
        expect("preparing", ["export", "run", "--out", "hf"], self.originals)
        (self.originals / "spec").mkdir()
        spec = (MODEL + LAYER).replace("[model]", "vocabulary = 256").replace("model.layer", "layer")
        (self.originals / "spec/spec.toml").write_text(spec + MANY)
        byte_level(self.originals)
        word_pieces(self.originals)
        (self.originals / "pieces").mkdir()
        expect("preparing", ["vocabulary", "corpus.txt", "--size", 300, "--out", "pieces/tokenizer.model"], self.originals)
        for folder in ["bpe", "plain", "words", "pieces"]:
            (self.originals / folder / "text.bin").write_text(CORPUS * 3)
        shutil.copytree(self.originals / "hf", self.originals / "sharded")
        self.shard(self.originals / "sharded")
        shutil.copytree(self.originals / "hf", self.originals / "pickled")
        self.read("save_as_torch", self.originals / "pickled")
        (self.originals / "pickled/model.safetensors").unlink()
        for folder, file, _, reader in TARGETS:  # what is whole is read
            self.check("whole " + file, self.read(reader, self.path(self.originals / folder, file, reader)), whole=True)

    @staticmethod
    def shard(folder):
        """One file and an index that names it for every tensor."""
        file = folder / "model.safetensors"
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        file.rename(folder / "model-00001-of-00001.safetensors")
        names = {name: "model-00001-of-00001.safetensors" for name in header if name != "__metadata__"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))

    @staticmethod
    def path(folder, file, reader):
        if reader == "model":
            return folder
        return folder / next(name for name in [file, "tokenizer.json", "tokenizer.model"] if name != "text.bin" and (folder / name).exists())

    def read(self, reader, path):
        if self.worker is None or self.worker.cases >= CASES:
            self.close()
            self.worker = Worker(self.place)
        try:
            return self.worker.read(reader, path)
        except (Broken, BrokenPipeError):
            self.close()
            raise

    @staticmethod
    def check(what, answer, whole=False):
        if answer["ended"] == "read":
            return
        message = answer["message"]
        wrong = fault(message)
        if answer["type"] not in ERRORS:
            wrong = f"{answer['type']}: {message[:300]!r}"
        if whole:
            wrong = f"is refused undamaged: {message[:300]!r}"
        if wrong:
            raise Broken(what, wrong)

    def case(self, number, random):
        folder, file, kind, reader = TARGETS[number % len(TARGETS)]
        damaged = self.place / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(self.originals / folder, damaged)
        (damaged / file).write_bytes(mutate(kind, (damaged / file).read_bytes(), random))
        what = f"{folder}/{file.rsplit('/', 1)[-1]}"
        began = time.monotonic()
        try:
            answer = self.read(reader, self.path(damaged, file, reader))
        except Broken as broken:
            raise Broken(what, str(broken)) from None
        self.check(what, answer)
        if time.monotonic() - began > SECONDS / 2:
            raise Broken(what, f"took {time.monotonic() - began:.0f} s")
        return what

    def close(self):
        if self.worker is not None:
            self.worker.end()
        self.worker = None
