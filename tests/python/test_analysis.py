"""headloom.analysis and model(tokens, maps=[...]), and the command headloom analyze."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch

import headloom
from cli_support import headloom as command
from cli_support import BINARY, make_place, refused

LAYER = {"mixer": {"type": "dcmha", "heads": 4}, "channel": {"type": "swiglu", "hidden": 24}}
SIZES = {"width": 16, "depth": 2, "max_length": 32, "tokenizer": "bytes"}


def make(layer=LAYER, **options):
    torch.manual_seed(0)
    model = headloom.model(layer=[layer], **{**SIZES, **options}).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn_like(p)
    return model


@pytest.fixture(scope="module")
def model():
    return make()


TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def test_maps_come_with_the_logits(model):
    logits, maps = model(TOKENS, maps=["weights", "layer1.scores.composed", "input"])
    assert set(maps) == {"layer0.weights", "layer1.weights", "layer1.scores.composed", "layer0.input", "layer1.input"}
    assert torch.allclose(logits, model(TOKENS), atol=1e-10)
    torch.testing.assert_close(maps["layer1.weights"], maps["layer1.scores.composed"].softmax(-1))
    assert maps["layer1.weights"].shape == (1, 4, 8, 8)
    logits.sum().backward()


def test_gradients_flow_through_maps(model):
    _, maps = model(TOKENS, maps=["weights.composed"])
    maps["layer0.weights.composed"].square().sum().backward()
    gradient = dict(model.named_parameters())["layer0.mixer.w2"].grad
    assert gradient is not None and gradient.abs().max() > 0
    model.zero_grad()


def test_maps_refuse(model):
    with pytest.raises(ValueError, match="has no 'weigths' to show; did you mean 'weights'"):
        model(TOKENS, maps=["weigths"])
    with pytest.raises(TypeError, match=r'expected a list of names such as \["weights"\]'):
        model(TOKENS, maps="weights")
    with pytest.raises(TypeError, match="maps is 3 .int., expected a list of names"):
        model(TOKENS, maps=3)
    assert list(model(TOKENS, maps=(name for name in ["layer1.weights"]))[1]) == ["layer1.weights"]
    with pytest.raises(ValueError, match="of two calls"):
        model(TOKENS, maps=["weights"], auxiliary=True)
    mamba = make({"mixer": {"type": "mamba"}, "channel": {"type": "none"}})
    with pytest.raises(ValueError, match="has no 'weights' to show; it has decay, input, output"):
        mamba(TOKENS, maps=["weights", "decay"])


def test_maps(model, tmp_path):
    found = headloom.analysis.maps(model, "To be, or not", layers=[1], heads=[0, 2])
    weights = found.arrays["layer1.weights.composed"]
    assert weights.shape == (1, 2, 13, 13) and not any(name.startswith("layer0") for name in found.arrays)
    _, direct = model(model.encode("To be, or not").unsqueeze(0), maps=["layer1.weights.composed"])
    np.testing.assert_allclose(weights, direct["layer1.weights.composed"].detach().numpy()[:, [0, 2]])
    added = found.tables[0].column("weights: query-wise")[0]
    assert isinstance(added, float) and added > 0
    found.save(tmp_path / "maps.html")
    page = (tmp_path / "maps.html").read_text()
    assert "http" not in page and "src=" not in page  # one file, without network
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert "".join(data["tokens"]) == "To be, or not" and data["panels"][0]["maps"][0]["heads"] == [0, 2]
    assert "<iframe" in found._repr_html_()
    # Differential attention has two maps of weights for each head, and one of composed ones.
    twice = headloom.analysis.maps(make({"mixer": {"type": "differential", "heads": 4}}), "To be, or not", heads=[1, 2])
    twice.save(tmp_path / "twice.html")
    data = json.loads((tmp_path / "twice.html").read_text().split('id="data">')[1].split("</script>")[0])
    maps = {m["name"]: (m["each"], m["heads"]) for m in data["panels"][0]["maps"]}
    assert maps["weights"] == (2, [1, 1, 2, 2]) and maps["weights.composed"] == (1, [1, 2])
    with pytest.raises(ValueError, match="no layer 2, expected 0 to 1"):
        headloom.analysis.maps(model, "To be", layers=[2])
    with pytest.raises(ValueError, match="has 40 tokens, but the model reads at most 32"):
        headloom.analysis.maps(model, "x" * 40)
    with pytest.raises(TypeError, match="layers is 'all'"):
        headloom.analysis.maps(model, "x", layers="all")
    with pytest.raises(ValueError, match="layers is empty, expected at least one number, or None for all."):
        headloom.analysis.maps(model, "x", layers=[])
    with pytest.raises(TypeError, match=r"layers is 0 \(int\), expected a list of whole numbers."):
        headloom.analysis.maps(model, "x", layers=0)
    with pytest.raises(TypeError, match="model is Linear.*, expected a headloom.Model."):
        headloom.analysis.maps(torch.nn.Linear(2, 2), "x")
    headloom.analysis.maps(torch.compile(model), "x")


def test_diversity(model):
    """The flattened products themselves, in NumPy."""
    found = headloom.analysis.diversity(model, "To be, or not to be")
    weight = dict(model.named_parameters())["layer0.mixer.qkv.weight"].detach().numpy()
    q, k = (weight[i * 16 : (i + 1) * 16].reshape(4, 4, 16) for i in (0, 1))
    products = np.einsum("hdc,hde->hce", q, k).reshape(4, -1)
    shares = np.linalg.svd(products, compute_uv=False) ** 2
    np.testing.assert_allclose(found.arrays["layer0.qk"], shares.cumsum() / shares.sum())
    assert -1 <= found.tables[0].column("similarity, composed")[0] <= 1


def test_rank_and_sparsity(model):
    found = headloom.analysis.rank(model, "To be, or not to be")
    tokens = model.encode("To be, or not to be").unsqueeze(0)
    _, maps = model(tokens, maps=["layer0.weights.composed"])
    direct = np.linalg.svd(maps["layer0.weights.composed"].detach().numpy(), compute_uv=False)
    np.testing.assert_allclose(found.arrays["layer0.length19.singular_values"], direct, atol=1e-9)
    assert max(found.tables[0].column("rank of scores")) <= 4
    edges = headloom.analysis.sparsity(model, tokens).arrays["layer0.edges"]
    assert edges.shape == (1, 4, 19) and (edges[..., 0] == 1).all() and (edges <= np.arange(1, 20)).all()


def test_rank_is_not_of_the_rounding_of_bfloat16(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = headloom.analysis.rank(model, "To be, or not to be")
    assert max(found.tables[0].column("rank of scores")) <= 4
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    with pytest.raises(ValueError, match="computes in BFloat16: convert it to float32"):
        headloom.analysis.rank(narrow, "To be, or not to be")
    with pytest.raises(TypeError, match="overhead: run is a Model, expected the folder of a run"):
        headloom.analysis.overhead(model)


def test_noise(model):
    text = "The code is 4213. The code is"
    found = headloom.analysis.noise(model, text, answer=" 4213")
    _, maps = model(model.encode(text).unsqueeze(0), maps=["layer1.weights"])
    row = maps["layer1.weights"].detach().numpy()[0, :, -1]
    np.testing.assert_allclose(found.arrays["layer1.softmax.answer"], row[:, 11:16].sum(-1))
    with pytest.raises(ValueError, match="'9' which does not stand|does not stand in the text"):
        headloom.analysis.noise(model, text, answer="9")
    with pytest.raises(ValueError, match="needs a question"):
        headloom.analysis.noise(model, text)


def test_memory_states_experts_params(model):
    assert headloom.analysis.memory(model, "To be, or not", top=3).arrays["layer0.largest"].shape == (10, 24)
    with pytest.raises(ValueError, match="top is 0, expected a whole number, at least 1"):
        headloom.analysis.memory(model, "To be", top=0)
    with pytest.raises(TypeError, match="top is '3' .str., expected a whole number"):
        headloom.analysis.experts(model, "To be", top="3")
    with pytest.raises(ValueError, match="no recurrent state is kept"):
        headloom.analysis.states(model, "To be")
    retention = make({"mixer": {"type": "retention", "heads": 2}})
    np.testing.assert_allclose(headloom.analysis.states(retention, "To be").arrays["layer1.decay"], [31 / 32, 63 / 64])
    moe = make({"mixer": {"type": "mha", "heads": 2}, "channel": {"type": "moe", "routed": 4, "active": 2, "hidden": 8}})
    assert headloom.analysis.experts(moe, "To be, or").arrays["layer0.load"].sum() == 18
    parts = headloom.analysis.params(model).tables[0]
    assert sum(parts.column("parameters")) == sum(p.numel() for p in model.parameters())
    with pytest.raises(KeyError, match="no column 'size'"):
        parts.column("size")


def test_theorems():
    found = headloom.analysis.theorems()
    assert len(found.tables) == 6
    assert max(found.tables[4].column("largest error")) == 0
    assert found.tables[4].column("second row") == ["100 56 12"] * 3


def test_encoder_decoder_and_images():
    writer = make(kind="encoder_decoder", max_source_length=32)
    found = headloom.analysis.maps(writer, "write", source="what is read")
    assert found.arrays["decoder.layer0.cross.weights"].shape == (1, 4, 5, 12)
    for analysis in ("rank", "sparsity", "memory", "diversity"):
        found = getattr(headloom.analysis, analysis)(writer, "write", source="what is read")
        assert any(name.startswith("encoder.") for name in found.arrays), analysis
    image = {"channels": 1, "height": 8, "width": 8, "patch": 4}
    torch.manual_seed(0)
    vit = headloom.model(
        kind="vit", width=16, depth=1, classes=3, image=image, pool="first", position={"type": "learned"}, layer=[LAYER]
    ).eval()
    found = headloom.analysis.maps(vit, torch.randn(1, 1, 8, 8))
    assert found.arrays["layer0.weights"].shape == (1, 4, 5, 5)
    assert '"class","0,0","0,1","1,0","1,1"' in found.html
    with pytest.raises(ValueError, match="read tokens, but this model reads images"):
        headloom.analysis.memory(vit, torch.randn(1, 1, 8, 8))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = make_place(tmp_path_factory.mktemp("analyze"))
    return folder


def test_command(place):
    run = "runs/text"
    done = command("analyze", run, "maps", "--text", "The quick", "--heads", "1", "--tensors", cwd=place)
    assert "layer0" in done.stdout and done.stderr.strip().endswith("maps.html")
    assert (place / run / "analysis" / "maps.html").exists()
    tensors = headloom.load(place / run)
    _, direct = tensors(tensors.encode("The quick").unsqueeze(0), maps=["layer0.weights"])
    from safetensors.torch import load_file

    kept = load_file(place / run / "analysis" / "maps.safetensors")
    torch.testing.assert_close(kept["layer0.weights"], direct["layer0.weights"][:, 1:])
    table = json.loads(command("analyze", run, "diversity", "--json", cwd=place).stdout)["tables"][0]
    assert table["rows"][0][0] == "layer0" and table["rows"][0][2] == 2
    everything = json.loads(command("analyze", run, "--json", "--out", "pages", cwd=place).stdout)
    assert "refused" in everything["experts"] and "tables" in everything["sparsity"]
    assert (place / "pages" / "rank.html").exists()
    assert "100 56 12" in command("analyze", "theorems", cwd=place).stdout


def test_all_analyses_read_the_question_of_a_long_sequence(tmp_path):
    """Its answer stands after the 256 tokens that the other analyses read."""
    text = "[model]\nwidth = 16\ndepth = 1\n[[model.layer]]\nmixer = {type = 'mha', heads = 2}\n"
    text += "[task]\ntype = 'needle'\nlength = 300\n[train]\nsteps = 1\nbatch = 2\neval_sequences = 2\n"
    (tmp_path / "needle.toml").write_text(text)
    command("train", "needle.toml", "--out", "run", cwd=tmp_path)
    everything = json.loads(command("analyze", "run", "--json", cwd=tmp_path).stdout)
    assert "tables" in everything["noise"]
    noise = json.loads(command("analyze", "run", "noise", "--json", cwd=tmp_path).stdout)
    assert everything["noise"]["tables"] == noise["tables"]


def test_tags_are_no_questions(tmp_path):
    """They are numbers as tokens are, but of classes."""
    (tmp_path / "tags.txt").write_text("".join(f"word{i} A\nlonger B\n\n" for i in range(40)))
    text = "[model]\nkind = 'encoder'\nwidth = 16\ndepth = 1\n[[model.layer]]\nmixer = {type = 'mha', heads = 2}\n"
    text += "[task]\ntype = 'tag_text'\npath = 'tags.txt'\nlength = 32\n[train]\nsteps = 1\nbatch = 2\neval_sequences = 2\n"
    (tmp_path / "tags.toml").write_text(text)
    command("train", "tags.toml", "--out", "run", cwd=tmp_path)
    assert "the analysis noise needs a question" in refused("analyze", "run", "noise", cwd=tmp_path)


def test_overhead(place):
    found = headloom.analysis.overhead(place / "runs" / "text", seconds=0.05)
    assert found.tables[0].column("work") == ["training step", "decoding a token"]
    assert all(speed > 0 for speed in found.tables[0].column("speed over plain"))
    with pytest.raises(ValueError, match="--length is 99, but the model reads at most 16"):
        headloom.analysis.overhead(place / "runs" / "text", length=99)
    with pytest.raises(RuntimeError, match="is not the folder of a run"):
        headloom.analysis.overhead(place / "nowhere")


@pytest.mark.parametrize(
    "layer",
    [
        {"mixer": {"type": "shaped", "heads": 2}, "block": {"type": "simplified", "form": "parallel"}},
        {"mixer": {"type": "talking_heads", "heads": 6, "key_heads": 4, "value_heads": 4, "kv_heads": 4}},
    ],
    ids=["simplified", "rectangular"],
)
def test_overhead_of_what_mha_does_not_fit(layer, tmp_path):
    headloom.model(width=48, depth=1, max_length=16, tokenizer="bytes", layer=[layer]).save(tmp_path / "run")
    found = headloom.analysis.overhead(tmp_path / "run", seconds=0.01)
    assert all(speed > 0 for speed in found.tables[0].column("speed over plain"))


def test_a_figure_of_a_benchmark_is_found_by_its_name(tmp_path):
    arguments = ("bench", "wkv", "--seconds", "0.001", "--threads", "1", "--only", "memory a position", "--json")
    found = json.loads(command(*arguments, cwd=tmp_path).stdout)
    (figure,) = found["requirements"]
    assert figure["what"].startswith("wkv ") and figure["measured"] > 0 and "cases" not in found


def test_what_a_model_of_images_has_no_use_for(tmp_path):
    text = "[model]\nkind = 'vit'\nwidth = 16\ndepth = 1\n[task]\ntype = 'images'\neval_sequences = 4\n[train]\nsteps = 1\nbatch = 2\n"
    (tmp_path / "vit.toml").write_text(text)
    command("train", "vit.toml", "--out", "vit", cwd=tmp_path)
    for arguments in (["maps"], []):
        assert 'this one is a "vit": leave it out' in refused("analyze", "vit", *arguments, "--text", "x", cwd=tmp_path)
    assert "--length is of tokens, but" in refused("analyze", "vit", "maps", "--length", "5", cwd=tmp_path)


def test_a_folder_that_cannot_be_written_is_told_of_out(place, tmp_path):
    shutil.copytree(place / "runs/text", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/analysis", ignore_errors=True)
    (tmp_path / "run/analysis").write_text("")  # in the way of any user, root too
    message = refused("analyze", "run", "params", cwd=tmp_path, code=1)
    assert message.startswith("run/analysis: ") and message.endswith("; choose another folder with --out."), message
    message = refused("analyze", "run", "params", "--out", "run/analysis", cwd=tmp_path, code=1)
    assert message.startswith("run/analysis: ") and not message.endswith("--out."), message


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["runs/text", "mapps"], "there is no analysis 'mapps'; did you mean 'maps'?"),
        (["runs/text", "overheads"], "there is no analysis 'overheads'; did you mean 'overhead'?"),
        (["runs/text", "x"], "memory, sparsity, params, theorems, overhead."),
        (["theorem"], "there is no folder and no analysis 'theorem'; did you mean 'theorems'?"),
        (["runs/text", "maps", "--layers", "2"], "there is no layer 2, expected 0 to 1."),
        (["runs/text", "maps", "--heads", "5"], "there is no head 5 in layer0, expected 0 to 1."),
        (["runs/text", "maps", "--text", "x" * 17], "--text has 17 tokens, but the model reads at most 16"),
        (["runs/text", "maps", "--text", ""], "--text is empty"),
        (["runs/text", "maps", "--length", "17"], "--length is 17, but the task's sequences have 16 tokens."),
        (["runs/text", "maps", "--text", "x", "--length", "1"], "--length is of held-out data, but --text is read whole"),
        (["runs/text", "experts"], "expected moe"),
        (["runs/text", "states"], "no recurrent state is kept"),
        (["runs/text", "noise"], "no position is a question"),
        (["runs/text", "noise", "--text", "abc", "--answer", "z"], "--answer is 'z', which does not stand in --text."),
        (["runs/text", "noise", "--answer", "z"], "--answer is a part of --text, but --text is missing."),
        (["runs/text", "rank", "--seconds", "1"], "--seconds is of 'overhead', which is not asked for: leave it out."),
        (["runs/text", "params", "--length", "8"], "--length is given, but 'params' reads nothing: leave it out."),
        (["runs/text", "states", "--layers", "1"], "no recurrent state is kept: the token mixers of layer 1 are"),
        (["runs/text", "maps", "--text="], "--text is empty"),
        (["runs/text", "params", "--text", "x"], "--text is given, but 'params' reads no text: leave it out."),
        (["runs/text", "overhead", "--text", "x"], "--text is given, but 'overhead' reads no text: leave it out."),
        (["runs/text", "overhead", "--heads", "0"], "--heads is given, but 'overhead' is of whole models: leave it out."),
        (["runs/text", "diversity", "--heads", "0"], "--heads is given, but 'diversity' is of whole layers: leave it out."),
        (["runs/text", "params", "--layers", "0"], "--layers is given, but 'params' is of the whole model: leave it out."),
        (["runs/text", "--layers", "9"], "there is no layer 9, expected 0 to 1."),
        (["runs/text", "--heads", "9"], "there is no head 9 in layer0, expected 0 to 1."),
        (["runs/text", "sparsity", "--text", "abc", "--answer", "b"], "--answer is of 'noise', but 'sparsity' asks for none: leave"),
        (["runs/text", "noise", "--text", "abc", "--answer", ""], "--answer is empty, expected a part of --text."),
        (["runs/text", "rank", "--top", "3"], "--top is given, but 'rank' has no list of the highest: leave it out."),
        (["runs/text", "maps", "--sequences", "999"], "--sequences is 999, but the task evaluates "),
        (["theorems", "--checkpoint", "last"], "--checkpoint is given, but 'theorems' is computed without a run: leave it out."),
        (["rank"], f"analyze: RUN, the folder of the run to look into, is missing; expected {BINARY} analyze RUN rank."),
    ],
)
def test_command_refuses(place, arguments, said):
    assert said in refused("analyze", *arguments, cwd=place)
