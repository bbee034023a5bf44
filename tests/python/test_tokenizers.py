"""tokenizer.json files read as the `tokenizers` package reads them, on random Unicode; damaged ones."""

import copy
import json
import random
import subprocess
import unicodedata

import headloom as package
import pytest
from cli_support import BINARY, ENVIRONMENT, headloom, run

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

pytestmark = pytest.mark.skipif(not BINARY.exists(), reason=f"{BINARY} is not built")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = [
    "The quick brown fox jumps over the lazy dog, don't you think? It's 12345 o'clock; we'll see.",
    "def f(x):\n    return x ** 2  # größer als Übermut, naïve café\n\n\n\tif True:  pass",
    "Привет, мир! Как дела? 你好世界,こんにちは。 안녕하세요 🙂🙃👩‍👩‍👧 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "e\u0301 a\u030a \u1e9b\u0323 \u00a0\u2003\u3000 \u0661\u0662\u0663 ½ Ⅷ",
]


def text_of(rng):
    """Mostly pieces of text, with any assigned characters between."""
    parts = []
    for _ in range(rng.randrange(1, 12)):
        kind = rng.randrange(8)
        if kind == 0:
            parts.append("".join(chr(rng.randrange(1, 128)) for _ in range(rng.randrange(8))))
        elif kind == 1:
            parts.append("".join(rng.choice(SAMPLE) for _ in range(rng.randrange(6))))
        elif kind == 2:
            parts.append("".join(rng.choice(" \t\n\r\u00a0\u2003\u3000\u0085\u2028\u180e\u200b") for _ in range(rng.randrange(6))))
        elif kind == 3:
            parts.append(rng.choice(["<|endoftext|>", "<|special|>", "<mask>", "word", "lone", "<|end", "'S", "'ſ", "'LL"]))
        elif kind == 4:
            parts.append("".join(rng.choice("0123456789٣½²") for _ in range(rng.randrange(9))))
        else:
            source = rng.choice(TEXT)
            start = rng.randrange(len(source))
            parts.append(source[start : start + rng.randrange(20)])
    return "".join(parts)


# Characters that every Unicode version in use knows alike.
SAMPLE = [
    chr(c)
    for c in range(0x80, 0x20000)
    if unicodedata.ucd_3_2_0.category(chr(c)) not in ("Cn", "Cs", "Co")
    and unicodedata.ucd_3_2_0.category(chr(c)) == unicodedata.category(chr(c))
]


def trained(pre_tokenizer, normalizer=None, special=("<|endoftext|>",), **model):
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(
        TEXT * 3,
        trainers.BpeTrainer(
            vocab_size=600,
            special_tokens=list(special),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def gpt2():
    return trained(pre_tokenizers.ByteLevel(add_prefix_space=False))


def neox():
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True), normalizers.NFC())
    tokenizer.add_tokens([AddedToken("      ", normalized=False), AddedToken("  ", normalized=False)])
    return tokenizer


def llama3():
    tokenizer = trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        special=("<|begin_of_text|>", "<|end_of_text|>", "<|special|>"),
        ignore_merges=True,
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing("<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]),
        ]
    )
    return tokenizer


def prefixed():
    """A space before each word, tokens that swallow spaces or stand alone, no alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False))
    tokenizer.add_tokens([AddedToken("lone", single_word=True), AddedToken("word", rstrip=True)])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True), "<|special|>"])
    return tokenizer


def bert(**options):
    """WordPiece with BERT's normalisation, words and template."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
    tokenizer.normalizer = normalizers.BertNormalizer(**options)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|special|>"]
    tokenizer.train_from_iterator(TEXT * 3, trainers.WordPieceTrainer(vocab_size=260, special_tokens=special, show_progress=False))
    tokenizer.add_tokens([AddedToken("lone", single_word=True)])
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return tokenizer


def cut(behavior, invert):
    return trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=behavior == "isolated"),
                pre_tokenizers.Split(Regex(r"[aeiou]|\s\s"), behavior=behavior, invert=invert),
                pre_tokenizers.Split("o", behavior="merged_with_previous"),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        ),
        normalizers.Sequence([normalizers.NFKD(), normalizers.NFKC()]),
    )


def words():
    """Sets of characters that other expressions' authors mean otherwise."""
    return trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\p{Han}+|\p{^Greek}\P{Latin}|[\w.]+|\W"), behavior="isolated"),
                pre_tokenizers.Split(Regex(r"(?=(?:\d{3})+(?!\d))"), behavior="merged_with_previous"),
                pre_tokenizers.Split(Regex(r"^\s+|\s+$|\h{,2}x|(?m:a.)e|\v"), behavior="isolated"),
                pre_tokenizers.Split(Regex(r"\bt\B|[[:digit:][:space:]]|[[:punct:]]+"), behavior="isolated"),
                pre_tokenizers.Split(Regex(r"\p{L}{2,3}+x|(?:o|[ue](?=[a-z])){1,2}+|é{2}?i|(?i:t(h)){1}+|[^]a-z ]{2}+\x{2e}|\x2c{1}+ "), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )


def swallowed():
    """Tokens of white space where another token takes the white space with it."""
    tokenizer = gpt2()
    tokenizer.add_tokens([AddedToken("word", rstrip=True), AddedToken("\n", rstrip=True), AddedToken(" a"), AddedToken("lone", lstrip=True)])
    tokenizer.add_tokens([AddedToken("\t", lstrip=True, rstrip=True)])
    return tokenizer


def numbers():
    """OpenAI's cl100k, in whose file an interval is followed by a plus."""
    return trained(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "{1,3}+")), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )


KINDS = {
    "gpt2": gpt2,
    "numbers": numbers,
    "words": words,
    "swallowed": swallowed,
    "neox": neox,
    "llama3": llama3,
    "prefixed": prefixed,
    "bert": bert,
    "bert-cased": lambda: bert(lowercase=False),
    "bert-accents": lambda: bert(strip_accents=False),
    "bert-raw": lambda: bert(clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False),
    **{
        f"{behavior}-{invert}": lambda b=behavior, i=invert: cut(b, i)
        for behavior, invert in [
            ("removed", False),
            ("isolated", True),
            ("merged_with_previous", False),
            ("merged_with_next", True),
            ("contiguous", False),
        ]
    },
}


def tokenize(path, texts):
    lines = "".join(json.dumps(text) + "\n" for text in texts)
    done = headloom("tokenize", path, "--json", input=lines.encode())
    return [json.loads(line) for line in done.stdout.split("\n")[:-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_tokenizers_package(kind, tmp_path):
    tokenizer = KINDS[kind]()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    rng = random.Random(kind)
    texts = ["", " ", *TEXT, "word " * 300, *(text_of(rng) for _ in range(1500))]
    texts.append("\n".join(TEXT) * (100_000 // len("\n".join(TEXT))))  # normalizers take it in several parts
    for text, ours in zip(texts, tokenize(path, texts), strict=True):
        theirs = tokenizer.encode(text, add_special_tokens=False).ids
        assert ours["tokens"] == theirs, repr(text)
        decoded = tokenizer.decode(theirs)
        if "\ufffd" not in decoded:
            assert ours["text"] == decoded, repr(text)


def test_merges_as_text_and_as_pairs_are_the_same(tmp_path):
    path = tmp_path / "tokenizer.json"
    gpt2().save(str(path))
    content = json.loads(path.read_text())
    first = tokenize(path, TEXT)
    content["model"]["merges"] = [
        " ".join(merge) if isinstance(merge, list) else merge.split(" ") for merge in content["model"]["merges"]
    ]
    path.write_text(json.dumps(content))
    assert tokenize(path, TEXT) == first


def test_a_model_is_copied_without_its_tokenizer_s_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    gpt2().save(str(path))
    model = package.model(width=32, depth=1, tokenizer=path, layer=[{"mixer": {"type": "mha", "heads": 4}}])
    path.unlink()
    copied = copy.deepcopy(model)
    assert copied is not model and copied.encode("a word").tolist() == model.encode("a word").tolist()


def refused(path, content):
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    path.write_bytes(content)
    done = run("tokenize", path, "--json", input=b'"text"\n')
    message = done.stderr
    assert done.returncode in (1, 2), message
    assert message.startswith("headloom: ") and message.count("\n") == 1 and str(path) in message, message
    return message


def test_what_is_not_read_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    gpt2().save(str(path))
    whole = path.read_text()

    def with_(**changes):
        return {**json.loads(whole), **changes}

    def with_model(**changes):
        return with_(model={**json.loads(whole)["model"], **changes})

    assert f"{path}: is not JSON: it ends in the middle (was it cut off?)." in refused(path, whole[:-5])
    assert f"{path}: is not JSON: it is empty." in refused(path, " \n")
    assert f"{path}: is not JSON: line 3 has '}}' in column 5, where it does not belong." in refused(path, '{"a": 1,\n "b":\n    }\n')
    assert f"{path}: is not JSON: it has the byte 0xff in column 2" in refused(path, b'{\xff"a": 1}')
    assert f"{path}: is nested deeper than 64 levels." in refused(path, "[" * 70 + "]" * 70)
    assert f"{path}: is JSON, but not an object" in refused(path, "[1, 2]")
    assert "has a number that is too large" in refused(path, '{"a": 1e999}')
    assert f"{path}: 'model' is missing, expected a table." in refused(path, "{}")
    assert "Unigram" in refused(path, with_model(type="Unigram"))
    assert "expected WordPiece" in refused(path, with_model(type="WordPiece"))
    assert "dropout" in refused(path, with_model(dropout=0.1))
    assert "Whitespace" in refused(path, with_(pre_tokenizer={"type": "Whitespace"}))
    assert "absent" in refused(path, with_(pre_tokenizer=None))
    assert "Lowercase" in refused(path, with_(normalizer={"type": "Lowercase"}))
    assert "WordPiece" in refused(path, with_(decoder={"type": "WordPiece"}))
    assert "not in its vocabulary" in refused(path, with_model(merges=["qq zz"]))
    assert "merge 0" in refused(path, with_model(merges=["abc"]))
    assert "id 4000000000" in refused(path, with_model(vocab={"a": 4000000000}))
    # What one entry claims gives no room to the next.
    claimed = [{"id": 65_000 * (i + 1), "content": f"<{i}>", "special": True} for i in range(4)]
    assert "id 130000" in refused(path, with_(added_tokens=claimed))
    steps = {"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 1000 + [{"type": "ByteLevel"}]}
    assert "more than 64 steps" in refused(path, with_(pre_tokenizer=steps))
    split = {"type": "Split", "pattern": {"Regex": r"(?=\u00e9)\C|"}, "behavior": "Isolated", "invert": False}
    assert r"\C" in refused(path, with_(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]}))
    assert "'model.vocab' is 3, expected a table." in refused(path, with_model(vocab=3))
    assert "'model.merges' is missing, expected a list." in refused(path, with_model(merges=None))
    assert "merge 0 is no pair" in refused(path, with_model(merges=[[1, 2]]))
    assert "'added_tokens[0].content' is 1, expected a text." in refused(path, with_(added_tokens=[{"content": 1}]))
    assert "'pre_tokenizer.type' is missing, expected a text." in refused(path, with_(pre_tokenizer={"a": 1}))
    assert "'pre_tokenizer' is 3, expected a table." in refused(path, with_(pre_tokenizer=3))
    assert "its post_processor is 'Nonsense'" in refused(path, with_(post_processor={"type": "Nonsense"}))
    bert().save(str(path))
    whole = path.read_text()
    assert "Lowercase" in refused(path, with_(normalizer={"type": "Lowercase"}))
    assert "Whitespace" in refused(path, with_(pre_tokenizer={"type": "Whitespace"}))
    assert "ByteLevel" in refused(path, with_(decoder={"type": "ByteLevel"}))
    assert "'[NONE]'" in refused(path, with_model(unk_token="[NONE]"))
    gpt2().save(str(path))
    whole = path.read_text()
    split = {"type": "Split", "pattern": {"Regex": "(a"}, "behavior": "Isolated", "invert": False}
    assert "not understood" in refused(path, with_(pre_tokenizer=split))
    for expression, what in {
        r"[^(\s|[.,])]+": "a set inside of a set at character 6",
        r"[\p{L}&&[^a]]": "an intersection of sets",
        r"a[^\W_]": r"\W inside brackets at character 3",
        r"[[:graph:]]": "[:graph:] at character 1",
        r"a{1,2}++": "an interval that is repeated twice at character 1",
    }.items():
        split["pattern"]["Regex"] = expression
        assert f"is not understood: it has {what}" in refused(path, with_(pre_tokenizer=split))
    split["pattern"]["Regex"] = r"[[:punct:]&]"
    path.write_text(json.dumps(with_(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel", "add_prefix_space": False}]})))
    assert tokenize(path, ["a&b"])[0]["text"] == "a&b"


def test_damage_gives_a_sentence(tmp_path):
    path = tmp_path / "tokenizer.json"
    rng = random.Random(3)
    for number in range(20):
        (gpt2 if number < 10 else bert)().save(str(path))
        whole = path.read_bytes()
        damaged = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        done = run("tokenize", path, "--json", input=b'"some text"\n')
        assert done.returncode in (0, 1), done
        assert done.returncode == 0 or done.stderr.startswith("headloom: "), done


def test_processes_that_encode_one_text_at_once_leave_one_file(tmp_path):
    gpt2().save(str(tmp_path / "tokenizer.json"))
    rng = random.Random(3)
    words = ["".join(rng.choice("abcde") for _ in range(rng.randrange(1, 9))) for _ in range(500)]
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(words) for _ in range(900_000)))
    (tmp_path / "run.toml").write_text("""
train = { steps = 2, batch = 2, eval_sequences = 2 }
model = { width = 16, depth = 1 }
task = { type = "text", paths = ["text.txt"], tokenizer = "tokenizer.json", length = 16 }
""")

    def losses(run):
        lines = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "loss" in line]

    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [str(BINARY), "train", "run.toml", "--out"]
    first = [subprocess.Popen([*command, run], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) for run in ("a", "b")]
    assert [process.wait(120) for process in first] == [0, 0]
    (kept,) = (tmp_path / "cache" / "headloom").glob("tokens-*")
    written = kept.read_bytes()
    headloom("train", "run.toml", "--out", "c", cwd=tmp_path, env=environment)
    kept.unlink()
    headloom("train", "run.toml", "--out", "d", cwd=tmp_path, env={**environment, "XDG_CACHE_HOME": "/proc/none"})
    assert not list((tmp_path / "cache" / "headloom").glob("tokens-*"))
    headloom("train", "run.toml", "--out", "e", cwd=tmp_path, env=environment)
    assert kept.read_bytes() == written
    assert len(losses("a")) >= 2
    assert all(losses(run) == losses("a") for run in "bcde")
