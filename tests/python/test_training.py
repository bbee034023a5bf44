"""What a training loop does beside gradients: the balance of experts, groups of parameters."""

import copy
import io
import warnings

import headloom
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parametrizations, prune, weight_norm
from torch.utils.checkpoint import checkpoint

SPEED = 0.125  # sums of it are exact
EXPERTS = {
    "type": "moe", "routed": 8, "active": 2, "shared": 1, "hidden": 8, "scores": "sigmoid", "bias_speed": SPEED,
}


def experts(seed=0, **options):
    torch.manual_seed(seed)
    shape = dict(width=32, depth=2, vocabulary=40, max_length=24, init_std=0.2)
    return headloom.model(**shape, layer=[{"mixer": {"type": "mha", "heads": 4}, "channel": EXPERTS}], **options)


def biases(model):
    return {name: b.clone() for name, b in model.named_buffers() if name.endswith("choice_bias")}


def tokens(rows=8, length=10, seed=3):
    return torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model, batch):
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def step(model, optimizer, pieces):
    for piece in pieces:
        (loss_of(model, piece) / len(pieces)).backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(model, cut=1, steps=3, lr=0.0):
    """Its biases after some steps on batches cut into pieces. Without a learning rate a batch's load does not depend on
    how its gradient was rounded."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    headloom.balance_experts(model, optimizer)
    for i in range(steps):
        step(model, optimizer, tokens(seed=i).chunk(cut))
    return biases(model)


def same(a, b):
    assert list(a) == list(b) and len(a) > 0
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


def test_the_bias_is_a_buffer_of_the_state():
    model = experts()
    names = ["layer0.channel.choice_bias", "layer1.channel.choice_bias"]
    assert list(biases(model)) == names and set(names) <= set(model.state_dict())
    assert not set(names) & {name for name, _ in model.named_parameters()}
    assert "choice_bias [8]" in repr(model)
    layer = headloom.channel_mixer("moe", 32, **{k: v for k, v in EXPERTS.items() if k != "type"})
    assert [name for name, _ in layer.named_buffers()] == ["choice_bias"]


@pytest.mark.parametrize("asked", [{}, {"auxiliary": True}, {"maps": ["weights"]}])
def test_every_training_call_counts_and_no_other(asked):
    model = experts()
    model(tokens(), **asked)
    assert all(not b.any() for b in biases(model).values())  # no step yet
    headloom.balance_experts(model)
    moved = biases(model)
    assert all(b.abs().max() == SPEED for b in moved.values())
    model.eval()(tokens(seed=9), **asked)
    headloom.balance_experts(model)
    same(biases(model), moved)


def test_padding_is_no_load():
    models = [experts(kind="encoder") for _ in range(2)]
    batch = tokens()
    padded = torch.cat([batch, torch.zeros(len(batch), 30, dtype=torch.int64)], 1)
    balances = [models[0](batch, auxiliary=True)[1]]
    balances.append(models[1](padded, lengths=torch.full([len(batch)], batch.shape[1]), auxiliary=True)[1])
    torch.testing.assert_close(*balances)
    for model in models:
        headloom.balance_experts(model)
    same(*map(biases, models))


def test_the_bias_moves_towards_equal_load():
    torch.manual_seed(1)
    layer = headloom.channel_mixer("moe", 32, **{k: v for k, v in EXPERTS.items() if k != "type"})
    x = torch.randn(4, 50, 32)
    scores = torch.sigmoid(x.flatten(0, 1) @ layer.gate.weight.detach().t())
    load = scores.topk(2).indices.flatten().bincount(minlength=8)
    layer(x)
    headloom.balance_experts(layer)
    expected = SPEED * torch.sign(load.double().mean() - load)
    torch.testing.assert_close(layer.choice_bias.double(), expected, rtol=0, atol=0)
    layer.load_state_dict({name: value.bfloat16() for name, value in layer.state_dict().items()}, assign=True)
    assert layer.choice_bias.dtype == torch.float32


@pytest.mark.parametrize("how", [lambda m: m.to(torch.bfloat16), lambda m: m.double().half(), lambda m: m.half(), lambda m: m.bfloat16().float().half()])
def test_the_bias_stays_in_float32_where_parameters_are_narrower(how):
    model = experts()
    for bias in biases(model):
        model.get_buffer(bias).fill_(0.501)  # bfloat16 knows 0.5 and 0.504
    converted = how(model)
    assert converted.layer0.channel.gate.weight.itemsize == 2
    assert all(torch.equal(b, torch.full([8], 0.501)) for b in biases(converted).values())
    loss_of(converted.float().bfloat16(), tokens()).backward()
    assert all(b.dtype == torch.float64 for b in biases(experts().double()).values())


def test_the_bias_of_a_model_that_is_made_narrow_is_float32():
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = experts()
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.layer0.channel.gate.weight.dtype == torch.bfloat16
    assert all(b.dtype == torch.float32 for b in biases(model).values())
    assert trained(model).keys() == biases(model).keys()


def test_accumulated_gradients_move_it_once_by_the_whole_batch():
    same(trained(experts(), cut=4), trained(experts()))
    assert all(b.abs().max() <= 3 * SPEED for b in trained(experts(), cut=4).values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    class Checkpointed(torch.nn.Module):
        """Computes every second piece again, so that counts that are doubled would be uneven."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.calls = 0
            # A reentrant checkpoint wants an input with a gradient.
            self.seed = torch.zeros((), requires_grad=True)

        def forward(self, x):
            self.calls += 1
            if self.calls % 2:
                return self.inner(x)
            run = lambda seed: self.inner(x) + seed  # noqa: E731
            return checkpoint(run, self.seed, use_reentrant=reentrant)

    wrapped = Checkpointed(experts())
    found = trained(wrapped, cut=4)
    assert wrapped.calls == 12
    same({name.removeprefix("inner."): b for name, b in found.items()}, trained(experts(), cut=4))


def test_compiled_as_eager():
    model = experts()
    run = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    headloom.balance_experts(model, optimizer)
    for i in range(3):
        batch = tokens(seed=i)
        cross_entropy(run(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
    same(biases(model), trained(experts()))


def test_operators_say_what_they_change():
    model = experts()
    inputs = (model.spec, model._tensors(), True, tokens())
    torch.library.opcheck(torch.ops.headloom.model, inputs, test_utils="test_schema")
    load = [torch.arange(8), torch.arange(8).flip(0)]
    torch.library.opcheck(torch.ops.headloom.balance_model, (model.spec, model._tensors(), load), test_utils="test_schema")
    with pytest.raises(ValueError, match="load has 1 tensors, expected 2"):
        torch.ops.headloom.balance_model(model.spec, model._tensors(), load[:1])


def test_encoder_and_decoder_have_biases_of_their_own():
    torch.manual_seed(0)
    layer = {"mixer": {"type": "mha", "heads": 4}, "channel": EXPERTS}
    model = headloom.model(
        kind="encoder_decoder", width=32, depth=1, encoder_depth=1, vocabulary=40, max_length=9, max_source_length=9,
        init_std=0.2, layer=[layer],
    )
    model(tokens(2, 3), source=tokens(2, 9, seed=5))
    assert [int(load.sum()) for load in model._load] == [2 * 2 * 9, 2 * 2 * 3]
    assert list(biases(model)) == ["encoder.layer0.channel.choice_bias", "decoder.layer0.channel.choice_bias"]


def test_copies_files_and_states_keep_the_bias(tmp_path):
    model = experts()
    trained(model)
    other = experts(seed=1)
    other.load_state_dict(model.state_dict())
    same(biases(other), biases(model))
    same(biases(copy.deepcopy(model)), biases(model))
    model.save(tmp_path / "run")
    again = headloom.load(tmp_path / "run")
    same(biases(again), biases(model))
    assert not any(p.requires_grad for p in again.buffers())
    torch.testing.assert_close(again(tokens()), model.eval()(tokens()))
    assert model.to(torch.bfloat16).train()(tokens()).dtype == torch.bfloat16
    assert all(load.dtype == torch.int64 for load in model._load)


@pytest.mark.parametrize("assign", [False, True])
def test_a_model_that_began_without_values_is_balanced(assign):
    model = experts()
    with torch.device("meta"):
        empty = experts()
    if not assign:
        empty.to_empty(device="cpu")
    empty.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    headloom.balance_experts(empty)
    for one in (model, empty):
        one(tokens())
        headloom.balance_experts(one)
    same(biases(empty), biases(model))


def test_a_load_that_nothing_balances_is_reported(monkeypatch):
    monkeypatch.setattr(headloom._functional, "_PATIENCE", 3)
    model = experts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            model(tokens())
            headloom.balance_experts(model)
    with pytest.warns(UserWarning, match="headloom.balance_experts"):
        for _ in range(3):
            model(tokens())


# --- Groups of parameters ---------------------------------------------------------------------


def hybrid():
    layers = [
        {"mixer": {"type": "mamba"}, "channel": {"type": "none"}},
        {"mixer": {"type": "rwkv"}, "channel": {"type": "rwkv_channel"}},
        {"mixer": {"type": "talking_heads", "heads": 4}, "channel": {"type": "swiglu"}},
    ]
    return headloom.model(width=32, depth=3, vocabulary=40, max_length=24, bias=True, layer=layers)


UNDECAYED = {"A_log", "mix", "pre_mix", "post_mix"}


def names_of(model, group):
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)] for p in group["params"]}


@pytest.mark.parametrize("copied", ["new", "deepcopy", "file", "to_empty", "assign", "nested", "unmarked"])
def test_groups_decay_matrices_but_for_those_that_are_exempt(copied):
    model = hybrid()
    if copied == "deepcopy":
        model = copy.deepcopy(model)
    elif copied == "file":
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        model = torch.load(stream, weights_only=False)
    elif copied in ("to_empty", "assign"):
        state = model.state_dict()
        with torch.device("meta"):
            model = hybrid()
        if copied == "to_empty":
            model.to_empty(device="cpu")
        model.load_state_dict(state, assign=copied == "assign")
    elif copied == "nested":
        model = torch.nn.ModuleDict({"loom": model, "norm": torch.nn.LayerNorm(4), "head": torch.nn.Linear(4, 4)})
    elif copied == "unmarked":  # as sharding does
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                module._parameters[name] = torch.nn.Parameter(p.detach())
    decayed, kept = headloom.parameter_groups(model, weight_decay=0.3)
    assert decayed["weight_decay"] == 0.3 and kept["weight_decay"] == 0
    assert names_of(model, decayed) | names_of(model, kept) == {name for name, _ in model.named_parameters()}
    assert not names_of(model, decayed) & names_of(model, kept)
    for name, p in model.named_parameters():
        exempt = p.dim() < 2 or name.split(".")[-1] in UNDECAYED
        assert (name in names_of(model, kept)) == exempt, name
        if copied != "unmarked" and name.split(".")[-1] in UNDECAYED:
            assert p._no_weight_decay
    torch.optim.AdamW([decayed, kept], lr=1e-3)


@pytest.mark.parametrize(
    "change, ends",
    [
        (lambda part, name: prune.l1_unstructured(part, name, 0.2), ["{}_orig"]),
        pytest.param(weight_norm, ["{}_g", "{}_v"], marks=pytest.mark.filterwarnings("ignore")),
        (parametrizations.weight_norm, ["parametrizations.{}.original0", "parametrizations.{}.original1"]),
    ],
)
def test_groups_know_what_a_parameter_is_computed_from(change, ends):
    model = hybrid()
    for part in list(model.modules()):
        for name in ("A_log", "mix", "weight"):
            if getattr(part, name, torch.ones(1)).dim() == 2:
                change(part, name)
    decayed, kept = headloom.parameter_groups(model.double().float())  # the marks of new tensors are lost
    for end in ends:
        assert f"layer0.mixer.{end.format('A_log')}" in names_of(model, kept)
        assert f"layer0.mixer.input.{end.format('weight')}" in names_of(model, decayed)


def test_groups_heed_the_marks_of_other_modules():
    other = torch.nn.Linear(4, 4)
    other.weight._no_weight_decay = True
    (kept,) = headloom.parameter_groups(other)
    with pytest.raises(ValueError, match="weight_decay is -0.1, expected 0 or more"):
        headloom.parameter_groups(other, weight_decay=-0.1)
    with pytest.raises(TypeError, match=r"weight_decay is None \(NoneType\), expected a number"):
        headloom.parameter_groups(other, weight_decay=None)
    assert kept["weight_decay"] == 0 and len(kept["params"]) == 2


# --- Workers of a DataLoader ------------------------------------------------------------------


class Loom(torch.utils.data.Dataset):
    """Each item is made in a worker by a tokenizer and a model."""

    def __init__(self):
        self.tokenizer, self.model = headloom.Tokenizer("bytes"), headloom.model(width=32, depth=1, tokenizer="bytes", max_length=512)
        self.model.requires_grad_(False)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.model(self.tokenizer.encode("the loom " * 40)[None]).mean()


def test_forked_workers_compute_after_threads_did():
    data = Loom()
    expected = data[0]  # by OpenMP's threads, which do not survive a fork
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=2, timeout=60, multiprocessing_context="fork")
    for batch in loader:
        torch.testing.assert_close(batch, expected.expand(2))
