"""A decoding step of Headloom's transformer++ against Hugging Face transformers' LLaMA of the same sizes.

    python bench/decode_transformers.py [--only 124M|10M] [--rounds N] [--threads N] [--json]

What is compared: one token after 512 and more, batch 1, float32, from a token to the likeliest next one, by
`model.extend` of the Python package and by `LlamaForCausalLM` in eager PyTorch with its static cache
(`StaticCache`, made for the whole length). Both have the same weights and read the same tokens; their logits
are compared first. The two take turns, a step each, in this process. The result is the median over the steps of
transformers' time over Headloom's. Targets: at least 1.1 at 124M parameters, where reading the weights
decides, and 2 at 10M, where overhead counts.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

try:
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
except ImportError as error:
    sys.exit(f"transformers does not load ({error}); install it with: pip install transformers")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
import headloom  # noqa: E402

CONTEXT, STEPS = 512, 64
SIZES = {
    "124M": dict(width=768, depth=12, heads=12, vocabulary=50257, target=1.1),
    "10M": dict(width=320, depth=8, heads=5, vocabulary=256, target=2.0),
}


def models(width, depth, heads, vocabulary, target):
    torch.manual_seed(1)
    hidden = (8 * width // 3 + 7) // 8 * 8
    ours = headloom.model(
        width=width,
        depth=depth,
        vocabulary=vocabulary,
        max_length=CONTEXT + STEPS,
        layer=[{"mixer": {"type": "mha", "heads": heads}, "channel": {"type": "swiglu", "hidden": hidden}}],
    ).eval()
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=hidden,
        vocab_size=vocabulary,
        max_position_embeddings=CONTEXT + STEPS,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )
    theirs = LlamaForCausalLM(config).eval()
    weights = dict(ours.named_parameters())
    names = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm.weight"]}
    for i in range(depth):
        qkv = weights[f"layer{i}.mixer.qkv.weight"].chunk(3)
        gate, up = weights[f"layer{i}.channel.up.weight"].chunk(2)
        names.update(
            {
                f"model.layers.{i}.self_attn.q_proj.weight": qkv[0],
                f"model.layers.{i}.self_attn.k_proj.weight": qkv[1],
                f"model.layers.{i}.self_attn.v_proj.weight": qkv[2],
                f"model.layers.{i}.self_attn.o_proj.weight": weights[f"layer{i}.mixer.output.weight"],
                f"model.layers.{i}.mlp.gate_proj.weight": gate,
                f"model.layers.{i}.mlp.up_proj.weight": up,
                f"model.layers.{i}.mlp.down_proj.weight": weights[f"layer{i}.channel.down.weight"],
                f"model.layers.{i}.input_layernorm.weight": weights[f"layer{i}.mixer_norm.weight"],
                f"model.layers.{i}.post_attention_layernorm.weight": weights[f"layer{i}.channel_norm.weight"],
            }
        )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(names[name])
    return ours, theirs


class Ours:
    def __init__(self, model, prompt):
        self.model, self.state = model, headloom.State()
        self.logits = model.extend(prompt, self.state, last=True)

    def __call__(self, token):
        self.logits = self.model.extend(token, self.state, last=True)
        return self.logits.argmax(-1)


class Theirs:
    def __init__(self, model, prompt):
        self.model = model
        self.cache = StaticCache(config=model.config, max_cache_len=CONTEXT + STEPS)
        self.logits = model(prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    def __call__(self, token):
        self.logits = self.model(token, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return self.logits.argmax(-1)


@torch.inference_mode()
def compare(sizes, rounds):
    ours, theirs = models(**sizes)
    times = {Ours: [], Theirs: []}
    for _ in range(rounds):
        tokens = torch.randint(0, sizes["vocabulary"], (1, CONTEXT + STEPS))
        steps = [Ours(ours, tokens[:, :CONTEXT]), Theirs(theirs, tokens[:, :CONTEXT])]
        for i in range(CONTEXT, CONTEXT + STEPS):
            for step in steps:
                start = time.perf_counter()
                step(tokens[:, i : i + 1])
                times[type(step)].append(time.perf_counter() - start)
        torch.testing.assert_close(steps[0].logits, steps[1].logits, rtol=1e-3, atol=1e-4)
    ratios = [a / b for a, b in zip(times[Theirs], times[Ours])]
    return {
        "parameters": sum(p.numel() for p in ours.parameters()),
        "headloom_seconds": statistics.median(times[Ours]),
        "transformers_seconds": statistics.median(times[Theirs]),
        "ratio": statistics.median(ratios),
        "quartiles": statistics.quantiles(ratios, n=4)[::2],
        "target": sizes["target"],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=4, help=f"of {STEPS} steps each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {name: compare(sizes, arguments.rounds) for name, sizes in SIZES.items() if arguments.only in (None, name)}
    if arguments.json:
        print(json.dumps({"threads": arguments.threads, "torch": torch.__version__, "cases": results}, indent=1))
        return
    for name, r in results.items():
        verdict = "PASS" if r["ratio"] >= r["target"] else "short of"
        print(
            f"{name} ({r['parameters']:,} parameters), {arguments.threads} threads, a token: "
            f"transformers {1e3 * r['transformers_seconds']:.2f} ms, headloom {1e3 * r['headloom_seconds']:.2f} ms, "
            f"ratio {r['ratio']:.2f} (quartiles {r['quartiles'][0]:.2f} - {r['quartiles'][1]:.2f}), {verdict} {r['target']}"
        )


if __name__ == "__main__":
    main()
