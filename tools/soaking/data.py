"""Damaged files that only the command line reads, each with a process of its own."""

import json
import shutil

import pictures
from mutate import mutate
from program import Broken, judge, run
from training import CORPUS, compare_config, text_run

DOC = "damaged configurations, corpora, annotated examples, images, metrics and results, given to the command line"
SHARE = 4
SECONDS = 40  # a case may take; half a second is usual

SMALL = """
[model]
{kind}width = 16
depth = 1
{more}
[task]
{task}
[train]
steps = 1
batch = 4
eval_every = 1
eval_sequences = 8
"""


def pairs():
    return "".join(f"the {a} fox\tjumps over {i} dogs\t{'yes' if i % 2 else 'no'}\n" for i, a in enumerate(["quick", "lazy", "brown"] * 10))


def sentences():
    word = lambda i: f"word{i} NN {'B-PER' if i % 3 == 0 else 'O'}"
    return "-DOCSTART- -X- O\n\n" + "\n".join("\n".join(word(i + j) for j in range(i % 6 + 1)) + "\n" for i in range(20))


def questions():
    def paragraph(i):
        context = f"The fox number {i} jumps over straße {i + 7} and sleeps."
        answers = [{"text": str(i + 7), "answer_start": context.index(str(i + 7))}]
        return {"context": context, "qas": [{"id": str(i), "question": "Which straße?", "answers": answers}]}

    return json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": [paragraph(i) for i in range(12)]}]})


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def image_folder(folder, ending, make):
    write(folder, {f"images/{label}/{i}.{ending}": make(pictures.pixels(8, shade + 9 * i)) for label, shade in [("a", 10), ("b", 200)] for i in range(3)})


def prepare(folder):
    """A folder for each target below, with all that its command needs."""
    encoder, vit = 'kind = "encoder"\n', 'kind = "vit"\n'

    def configured(name, task, kind="", more=""):
        write(folder / name, {"x.toml": SMALL.format(kind=kind, task=task, more=more)})

    configured("text", 'type = "text"\npaths = ["corpus.txt"]\nlength = 16\neval_tokens = 64')
    write(folder / "text", {"corpus.txt": CORPUS * 20})
    configured("classes", 'type = "classify_text"\npath = "texts"\nlength = 16', encoder)
    write(folder / "classes", {f"texts/{label}/{i}.txt": CORPUS * 2 + label for label in "ab" for i in range(3)})
    configured("pairs", 'type = "classify_pairs"\npath = "pairs.tsv"\nlength = 48', encoder)
    write(folder / "pairs", {"pairs.tsv": pairs()})
    configured("tags", 'type = "tag_text"\npath = "tags.conll"\nlength = 32', encoder)
    write(folder / "tags", {"tags.conll": sentences()})
    configured("spans", 'type = "find_span"\npath = "squad.json"\nlength = 80', encoder)
    write(folder / "spans", {"squad.json": questions()})
    for ending, make in [("png", pictures.png), ("jpg", pictures.jpeg), ("ppm", pictures.ppm)]:
        configured(ending, 'type = "images"\npath = "images"\nsize = 8\nresize = true', vit, "[model.image]\npatch = 4")
        image_folder(folder / ending, ending, make)
    configured("cifar", 'type = "images"\npath = "cifar"\nsize = 32', vit, "[model.image]\npatch = 8")
    write(folder / "cifar", {"cifar/data_batch_1.bin": pictures.cifar(12), "cifar/test_batch.bin": pictures.cifar(4)})
    shutil.copytree(folder / "text", folder / "toml")
    shutil.copytree(folder / "text", folder / "vocabulary")
    (folder / "compare").mkdir()
    compare_config(folder / "compare", steps=2)
    (folder / "finished").mkdir()
    text_run(folder / "finished", "run")
    shutil.copytree(folder / "compare", folder / "compared")
    judge("preparing", run(["compare", "compare.toml", "--out", "out"], folder / "compared"))


TRAIN = ["train", "x.toml", "--out", "out"]
# Folder, the file in it that is damaged, how, and the command that reads it.
TARGETS = [
    ("toml", "x.toml", "toml", [*TRAIN, "--set", "train.steps=1"]),
    ("text", "corpus.txt", "text", TRAIN),
    ("classes", "texts/a/1.txt", "text", TRAIN),
    ("pairs", "pairs.tsv", "columns", TRAIN),
    ("tags", "tags.conll", "columns", TRAIN),
    ("spans", "squad.json", "json", TRAIN),
    ("png", "images/a/1.png", "png", TRAIN),
    ("jpg", "images/a/1.jpg", "bytes", TRAIN),
    ("ppm", "images/a/1.ppm", "text", TRAIN),
    ("cifar", "cifar/data_batch_1.bin", "bytes", TRAIN),
    ("compare", "compare.toml", "toml", ["compare", "compare.toml", "--out", "out", "--set", "train.steps=1"]),
    ("toml", "x.toml", "toml", ["describe", "x.toml"]),
    ("finished", "run/metrics.jsonl", "jsonl", ["train", "run", "--resume"]),
    ("finished", "run/config.toml", "toml", ["eval", "run", "--sequences", "4"]),
    ("finished", "run/checkpoints/step-4/state.json", "state", ["train", "run", "--resume"]),
    ("compared", "out/runs/copy/mha/seed-1/result.json", "json", ["compare", "compare.toml", "--out", "out"]),
    ("compared", "out/runs/copy/mha/seed-1/metrics.jsonl", "jsonl", ["compare", "compare.toml", "--out", "out"]),
    ("vocabulary", "corpus.txt", "text", ["vocabulary", "corpus.txt", "--size", "300", "--out", "v.model"]),
]


class Campaign:
    def __init__(self, place):
        self.place, self.originals = place, place / "originals"
        prepare(self.originals)
        self.whole = set()

    def run(self, folder, command):
        done = run(command, self.place / "damaged", seconds=SECONDS)
        judge(folder, done)
        return done

    def case(self, number, random):
        folder, file, kind, command = TARGETS[number % len(TARGETS)]
        damaged = self.place / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(self.originals / folder, damaged)
        what = f"{command[0]} {file.rsplit('/', 1)[-1]}"
        if (folder, file) not in self.whole:  # what is whole is read
            done = self.run(what, command)
            if done.code != 0:
                raise Broken(what, f"the undamaged {file} is refused: {done.message!r}")
            self.whole.add((folder, file))
            shutil.rmtree(damaged)
            shutil.copytree(self.originals / folder, damaged)
        (damaged / file).write_bytes(mutate(kind, (damaged / file).read_bytes(), random))
        self.run(what, command)
        return what

    def close(self):
        pass
