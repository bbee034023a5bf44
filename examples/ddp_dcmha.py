"""Trains a language model with dynamically composed heads (DCMHA) on several processes with DistributedDataParallel.

    torchrun --nproc_per_node 2 examples/ddp_dcmha.py --save runs/ddp
    headloom generate runs/ddp --prompt "the old "

Every step's batch is drawn from (seed, step) and shared out to the processes, so that one process (``python
examples/ddp_dcmha.py``) learns the same as several, to rounding.
"""

import argparse
import os
import random
import time

import headloom
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def generated_text(sentences: int = 4000) -> bytes:
    """Sentences of a small grammar."""
    rng = random.Random(0)
    nouns, verbs = ["weaver", "loom", "thread", "shuttle", "cloth"], ["sees", "turns", "holds", "follows"]
    kinds = ["old", "red", "long", "quiet"]

    def phrase() -> str:
        return f"the {rng.choice(kinds)} {rng.choice(nouns)}"

    return " ".join(f"{phrase()} {rng.choice(verbs)} {phrase()}." for _ in range(sentences)).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", help="a file to learn; generated sentences by default")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step, of all processes together")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save", help="folder of the run to write")
    options = parser.parse_args()

    dist.init_process_group("gloo") if "RANK" in os.environ else None
    rank, processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if options.batch % processes != 0:
        parser.error(f"--batch is {options.batch}, expected a multiple of the {processes} processes")

    text = open(options.text, "rb").read() if options.text else generated_text()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    torch.manual_seed(0)  # every process starts with the same weights
    model = headloom.model(
        width=96,
        depth=3,
        tokenizer="bytes",
        max_length=options.length,
        layer=[{"mixer": {"type": "dcmha", "heads": 4}, "channel": {"type": "swiglu"}}],
    )
    trained = DistributedDataParallel(model) if processes > 1 else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=options.lr, betas=(0.9, 0.95))

    for step in range(options.steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(data) - options.length, (options.batch,), generator=generator)
        batch = torch.stack([data[i : i + options.length + 1] for i in starts.tolist()]).long()
        own = batch.chunk(processes)[rank]
        loss = cross_entropy(trained(own[:, :-1]).flatten(0, 1), own[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == options.steps - 1:
            mean = loss.detach()
            if processes > 1:
                dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item() / processes:.5f}", flush=True)

    if processes > 1:
        for name, parameter in model.named_parameters():
            first = parameter.detach().clone()
            dist.broadcast(first, src=0)
            if not torch.equal(first, parameter):
                raise RuntimeError(f"process {rank} has another {name} than process 0.")
        dist.barrier()
        if rank == 0:
            print(f"the {processes} replicas are equal")
    if rank == 0:
        if options.save:
            model.save(options.save)
        print(model.eval().generate("the old ", 60, temperature=0))
    if processes > 1:
        # A moment after the last collective gloo's threads drop its tensors, which takes the interpreter: ending it
        # before that aborts the process.
        time.sleep(0.5)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
