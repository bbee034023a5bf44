"""DTensor splits the operators by batch, and by heads where nothing mixes them: results and gradients are those of whole tensors."""

import headloom.dtensor  # noqa: F401  (the rules)
import pytest
import torch
import torch.distributed as dist
from distributed_support import said_by_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

OPS = torch.ops.headloom
B, T, H, D = 3, 7, 4, 8  # two processes cannot share three sequences equally


RANDOM = torch.Generator().manual_seed(0)  # the same in both processes


def rand(*sizes):
    return torch.randn(*sizes, generator=RANDOM)


def qkv(heads=H, keys=H):
    return {"q": rand(B, T, heads, D), "k": rand(B, T, keys, D), "v": rand(B, T, keys, D)}


# So few queries would go to PyTorch's own attention, which DTensor cannot split on a CPU.
PLAIN = {"pre": [], "post": [], "backend": "fused"}


def mix(heads):
    def of_queries_or_keys():
        return [rand(B, T, 2, heads), rand(B, T, 2, heads), rand(B, T, heads)]

    return [None, *of_queries_or_keys(), *of_queries_or_keys()]


STATIC = [0.1 * rand(H, H) + torch.eye(H)] + [None] * 6
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1]] * B)
LENGTHS = torch.tensor([7, 3, 5])
SCAN = {"u": rand(B, T, 12), "delta": rand(B, T, 12).abs(), "A": -rand(12, 4).abs(), "B": rand(B, T, 4), "C": rand(B, T, 4)}

# An operator, its arguments, where the first is split (a dimension, or None), and how the result then lies. "heads" is dimension 2.
CASES = {
    "plain attention, batch": ("composed_attention", {**qkv(), **PLAIN, "lengths": LENGTHS}, 0, 0),
    "plain attention, heads": ("composed_attention", {**qkv(H, 2), **PLAIN, "bias": rand(1, H, T, T), "window": 4}, 2, 2),
    "keys that do not divide": ("composed_attention", {**qkv(H, 1), **PLAIN}, 2, None),
    "composed, batch": ("composed_attention", {**qkv(), "pre": mix(H), "post": mix(H), "documents": DOCUMENTS}, 0, 0),
    "static, batch": ("composed_attention", {**qkv(), "pre": STATIC, "post": [], "bias": rand(B, 1, T, T)}, 0, 0),
    "composed, heads": ("composed_attention", {**qkv(), "pre": mix(H), "post": []}, 2, None),
    "convolved, heads": ("composed_attention", {**qkv(), "pre": [], "post": [], "pre_conv": rand(H, 2, 3)}, 2, None),
    "along the sequence": ("composed_attention", {**qkv(), **PLAIN}, 1, None),
    "retention, batch": ("retention", {**qkv(), "gamma": 1 - 2.0 ** (-5 - torch.arange(H)), "state": rand(B, H, D, D)}, 0, 0),
    "retention, heads": ("retention", {**qkv(), "gamma": 1 - 2.0 ** (-5 - torch.arange(H)), "documents": DOCUMENTS}, 2, 2),
    "gla, heads": ("gated_linear_attention", {**qkv(), "log_decay": -rand(B, T, H, D).abs(), "state": rand(B, H, D, D)}, 2, 2),
    "wkv, batch": ("wkv", {"k": rand(B, T, 12), "v": rand(B, T, 12), "rate": rand(12).abs(), "bonus": rand(12)}, 0, 0),
    "wkv, channels": (
        "wkv",
        {"k": rand(B, T, 12), "v": rand(B, T, 12), "rate": rand(12).abs(), "bonus": rand(12), "receptance": rand(B, T, 12)},
        2,
        2,
    ),
    "scan, batch": ("selective_scan", {**SCAN, "D": rand(12), "delta_bias": rand(12), "delta_softplus": True}, 0, 0),
    "scan, channels": ("selective_scan", {**SCAN, "D": rand(12), "z": rand(B, T, 12)}, 2, 2),
    "aft, channels": ("aft", {"q": rand(B, T, 12), "k": rand(B, T, 12), "v": rand(B, T, 12), "form": "local", "bias": rand(T, 3)}, 2, 2),
    "aft conv, channels": ("aft", {"q": rand(B, T, 12), "k": rand(B, T, 12), "v": rand(B, T, 12), "form": "conv", "bias": rand(4, 3)}, 2, 2),
    "aft conv, a head for both": (
        "aft", {"q": rand(B, T, 12), "k": rand(B, T, 12), "v": rand(B, T, 12), "form": "conv", "bias": rand(1, 3)}, 2, None,
    ),
    "aft full, batch": ("aft", {"q": rand(B, T, 12), "k": rand(B, T, 12), "v": rand(B, T, 12), "form": "full", "bias": rand(T, T)}, 0, 0),
    "aft full, channels": ("aft", {"q": rand(B, T, 12), "k": rand(B, T, 12), "v": rand(B, T, 12), "form": "full", "bias": rand(T, T)}, 2, 2),
    "convolution, batch": ("causal_conv1d", {"x": rand(B, T, 12), "weight": rand(12, 4), "bias": rand(12)}, 0, 0),
    "convolution, channels": ("causal_conv1d", {"x": rand(B, T, 12), "weight": rand(12, 4), "bias": rand(12), "silu": True}, 2, 2),
    "token shift, batch": ("token_shift", {"x": rand(B, T, 12), "mix": rand(3, 12)}, 0, 0),
    "token shift, channels": ("token_shift", {"x": rand(B, T, 12), "mix": rand(3, 12)}, 2, 2),
    "gated norm, heads": ("gated_norm", {"x": rand(B, T, H, D), "gate": rand(B, T, H, D), "eps": rand(1, T, H).abs()}, 2, 2),
    "gated norm, batch": ("gated_norm", {"x": rand(B, T, D), "gate": rand(B, T, D), "eps": torch.tensor(1e-5)}, 0, 0),
    "gated norm, rows": ("gated_norm", {"x": rand(6, D), "gate": rand(6, D), "eps": rand(6).abs()}, 0, 0),
    "gated norm, features": ("gated_norm", {"x": rand(B, T, D), "gate": rand(B, T, D), "eps": torch.tensor(1e-5)}, 2, None),
    "gated norm, five dimensions": (
        "gated_norm", {"x": rand(2, T, H, 3, D), "gate": rand(2, T, H, 3, D), "eps": rand(2, 1, 1, 1).abs()}, 2, 2,
    ),
    "rotary, heads": ("rotary", {"x": rand(B, T, H, D), "cos": rand(T, 4), "sin": rand(T, 4)}, 2, 2),
    "norm, sequence": ("rms_norm", {"x": rand(B, T, 12), "scale": rand(12)}, 1, 1),
    "norm, features": ("rms_norm", {"x": rand(B, T, 12), "scale": rand(12)}, 2, None),
    "swiglu, batch": ("swiglu", {"x": rand(B, T, 12)}, 0, 0),
    "gelu, batch": ("gelu_tanh", {"x": rand(B, T, 12)}, 0, 0),
    "linear, sequence": ("linear", {"x": rand(B, T, 12), "weight": rand(5, 12), "bias": rand(5)}, 1, 1),
    "cross-entropy": ("linear_cross_entropy", {"hidden": rand(9, 12), "weight": rand(20, 12), "targets": torch.arange(9)}, 0, "sum"),
    "experts": (
        "moe",
        {
            "x": rand(9, 12),
            "up": rand(3, 8, 12),
            "down": rand(3, 12, 4),
            "choice": torch.arange(18).view(9, 2) % 3,
            "weight": rand(9, 2),
        },
        0,
        0,
    ),
}  # fmt: skip
CONSTANT = {"gamma", "eps", "cos", "sin"}


def learns(name, value):
    return isinstance(value, torch.Tensor) and value.is_floating_point() and name not in CONSTANT


def call(name, arguments):
    """The results and the gradients of a weighted sum of them."""
    out = getattr(OPS, name)(**arguments)
    out = list(out) if isinstance(out, (list, tuple)) else [out]
    total = sum((t * torch.arange(1.0, t.numel() + 1).view(t.shape).cos()).sum() for t in (whole(o) for o in out) if t.is_floating_point())
    total.backward()
    gradients = {}
    for key, value in arguments.items():
        for i, one in enumerate(value if isinstance(value, list) else [value]):
            if learns(key, one):
                gradients[key, i] = one.grad
    return out, gradients


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def each(arguments, function):
    return {k: [function(k, one) for one in v] if isinstance(v, list) else function(k, v) for k, v in arguments.items()}


def fresh(name, value):
    return value.clone().requires_grad_(True) if learns(name, value) else value


def check(case, mesh, placements):
    name, arguments, _, lies = CASES[case]
    expected, gradients = call(name, each(arguments, fresh))
    first = next(iter(arguments))

    def spread(key, value):
        # The others lie somewhere else: replicated, or plain tensors where no gradient is asked for.
        if not learns(key, value):
            return value
        place = placements if key == first else [Replicate()] * mesh.ndim
        return distribute_tensor(value, mesh, place).requires_grad_(True)

    found, their_gradients = call(name, each(arguments, spread))
    for a, b in zip(expected, found, strict=True):
        assert isinstance(b, DTensor), case
        torch.testing.assert_close(whole(b), a, atol=1e-4, rtol=1e-4, msg=lambda text: f"{case}: {text}")
    assert gradients.keys() == their_gradients.keys()
    for key, gradient in gradients.items():
        theirs = their_gradients[key]
        assert isinstance(theirs, DTensor), (case, key)
        torch.testing.assert_close(
            whole(theirs), gradient, atol=1e-3, rtol=1e-3, msg=lambda text, key=key: f"{case}, gradient of {key}: {text}"
        )
    if mesh.ndim == 1:
        (place,) = found[0].placements
        right = place.is_partial() if lies == "sum" else place.is_replicate() if lies is None else place.is_shard(lies)
        assert right, (case, place)


def check_dynamic_weights(mesh):
    """On a CPU only its reference has a gradient, and its kernel runs for at most 16 rows."""
    hidden, w2 = rand(4, 2, 2 * 6), rand(2, 1, 6, 2 * 2 * H)
    shared = distribute_tensor(hidden, mesh, [Shard(0)])
    with torch.no_grad():
        expected = OPS.dynamic_weights(hidden, w2, 2)
        found = OPS.dynamic_weights(shared, distribute_tensor(w2, mesh, [Replicate()]), 2)
    for a, b in zip(expected, found, strict=True):
        assert [str(place) for place in b.placements] == ["S(0)"]
        torch.testing.assert_close(whole(b), a)


def as_rank():
    as_one_of_four()
    dist.init_process_group("gloo")
    mesh, square = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (1, 2))
    for case, (_, _, dim, _) in CASES.items():
        check(case, mesh, [Shard(dim)])
    check_dynamic_weights(mesh)
    for case in ("retention, heads", "plain attention, heads", "composed, batch"):
        check(case, square, [Shard(0), Shard(CASES[case][2])])
    # A sum that is not yet a sum is added up first.
    partial = DTensor.from_local(torch.ones(2, 6), mesh, [torch.distributed.tensor.Partial()])
    torch.testing.assert_close(OPS.swiglu(partial).full_tensor(), OPS.swiglu(torch.full((2, 6), 2.0)))
    dist.barrier()
    print("two share all")


def as_one_of_four():
    """Two dimensions of a mesh split the four heads of q between four processes; k and v have two."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2))
    q, k = rand(2, T, 4, D), rand(2, T, 2, D)
    shared = distribute_tensor(q, mesh, [Shard(2), Shard(2)], src_data_rank=None)
    found = headloom.composed_attention(shared, k, k, backend="fused")
    print("placed", [str(p) for p in found.placements])
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said():
    return said_by_ranks(__file__)


def test_heads_that_two_dimensions_of_a_mesh_split(said):
    assert ["placed ['S(2)', 'R']" in text for text in said] == [True, True], "\n".join(said)


def test_two_processes_share_every_operator(said):
    with_kernels = {name for name in headloom.ops.__all__ if hasattr(torch.ops.headloom, f"{name}_fused")}
    assert headloom.dtensor.RULES.keys() == with_kernels
    # check_dynamic_weights() has that one.
    assert {name for name, *_ in CASES.values()} == headloom.dtensor.RULES.keys() - {"dynamic_weights"}
    assert ["two share all" in text for text in said] == [True, True], "\n".join(said)
