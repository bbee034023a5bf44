"""PyTorch's own ways to train on several processes, on Headloom's Python models.

They are DistributedDataParallel, FSDP2 and distributed checkpoints.
"""

import pathlib

import headloom
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_support import said_by_ranks
from test_training import biases, experts, loss_of, same, tokens, trained
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

EXPERTS = {"type": "moe", "routed": 4, "active": 2, "shared": 1, "hidden": 8, "scores": "sigmoid", "bias_speed": 1e-2}
# An odd width, which two processes cannot share equally.
LAYERS = [
    {"mixer": {"type": "dcmha", "heads": 3}, "channel": EXPERTS},
    {"mixer": {"type": "mamba"}, "channel": {"type": "swiglu", "hidden": 20}},
]


def new(seed):
    torch.manual_seed(seed)
    return headloom.model(width=15, depth=2, vocabulary=32, max_length=12, layer=LAYERS, position={"type": "none"})


def adamw(model):
    return torch.optim.AdamW(headloom.parameter_groups(model), lr=1e-2)


def step(model, optimizer, number, rank=0, size=1, run=None):
    """The mean loss of one of the parts of a batch of six; `run` makes the scores."""
    tokens = torch.randint(32, (6, 13), generator=torch.Generator().manual_seed(number)).chunk(size)[rank]
    scores = (run or model)(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    headloom.balance_experts(model)
    return loss.detach()


def whole(model):
    """A state dict without shards."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in model.state_dict().items()}


def refusal(call):
    """What a call says that is refused."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def as_rank(folder):
    """What each of two processes does, or of three, which go on from the checkpoint of the two."""
    folder = pathlib.Path(folder)
    dist.init_process_group("gloo")
    rank, size, found = dist.get_rank(), dist.get_world_size(), {}

    model = new(0)
    optimizer, replica = adamw(model), DistributedDataParallel(model)
    for number in range(4):
        step(model, optimizer, number, rank, size, replica)
    found["ddp"] = whole(model)

    model = fully_shard(new(0))
    register_fsdp_forward_method(model, "loss")
    optimizer = adamw(model)
    for number in range(2):
        step(model, optimizer, number, rank, size)
    if size == 2:
        dcp.save(dict(zip(["model", "optimizer"], get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder / "dcp")
    for number in range(2, 4):
        step(model, optimizer, number, rank, size)
    found["fsdp"] = whole(model)
    tokens = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        found["loss"] = model.loss(tokens, tokens).detach()

    model = fully_shard(new(1))
    found["refused"] = {
        "extend": refusal(lambda: model.extend(tokens, headloom.State())),
        "generate": refusal(lambda: model.generate(tokens, 1)),
        "save": refusal(lambda: model.save(folder / "saved")),
    }
    optimizer = adamw(model)
    state = dict(zip(["model", "optimizer"], get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder / "dcp")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for number in range(2, 4):
        step(model, optimizer, number, rank, size)
    found["resumed"] = whole(model)

    found["biases"] = biases_of_rank(rank) if size == 2 else {}
    torch.save(found, folder / f"found-{rank}-of-{size}.pt")
    dist.barrier()


def biases_of_rank(rank):
    """Those of experts that plain DDP trains, whose buffers it broadcasts."""
    model = experts(seed=rank)  # the first rank's weights are everyone's
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    headloom.balance_experts(model, optimizer)
    for i in range(3):
        # Two pieces a step without no_sync(): buffers are broadcast between them.
        for piece in tokens(seed=i).chunk(4)[rank::2]:
            loss_of(wrapped, piece).backward()
        optimizer.step()
        optimizer.zero_grad()
    return biases(model)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    for ranks in (2, 3):
        said_by_ranks(__file__, folder, ranks=ranks)
    return folder, *(torch.load(folder / f"found-0-of-{ranks}.pt") for ranks in (2, 3))


@pytest.fixture(scope="module")
def alone():
    """The model of one process, after two steps and after four."""
    model = new(0)
    optimizer, states = adamw(model), []
    for number in range(4):
        step(model, optimizer, number)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return model, states


@pytest.mark.parametrize("place", [1, 2], ids=["two", "three"])
@pytest.mark.parametrize("way", ["ddp", "fsdp", "resumed"])
def test_processes_learn_what_one_does(found, alone, way, place):
    torch.testing.assert_close(found[place][way], alone[1][3], atol=2e-4, rtol=0)


def test_a_sharded_model_has_its_loss(found, alone):
    tokens = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        torch.testing.assert_close(found[1]["loss"], alone[0].loss(tokens, tokens), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "call, words",
    [("extend", "register_fsdp_forward_method"), ("generate", "register_fsdp_forward_method"), ("save", "get_model_state_dict")],
)
def test_what_needs_the_whole_parameters_says_so(found, call, words):
    said = found[1]["refused"][call]
    assert "parameter 'embedding' is a DTensor" in said and words in said, said
    assert not (found[0] / "saved").exists()


def test_a_sharded_checkpoint_goes_on_with_the_same_bits(found):
    for name, value in found[1]["fsdp"].items():
        assert torch.equal(value, found[1]["resumed"][name]), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_reads_a_sharded_checkpoint(found, alone):
    state = {"model": new(2).state_dict()}
    dcp.load(state, checkpoint_id=found[0] / "dcp")
    torch.testing.assert_close(state["model"], alone[1][1], atol=2e-4, rtol=0)


def test_ranks_of_plain_ddp_have_the_biases_of_one_process_on_the_joint_batch(found):
    one = trained(experts())
    for rank in range(2):
        same(torch.load(found[0] / f"found-{rank}-of-2.pt")["biases"], one)
