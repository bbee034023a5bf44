"""Headloom's program against llama.cpp on the same weights: prefill and decoding, in four types.

    python bench/decode_llama_cpp.py [--only int4] [--rounds N] [--threads N] [--json]

Needs the packages llama-cpp-python and gguf beside this package's own, and build/bin/headloom. What is compared: a
model of LLaMA's shape with 134M random weights reads 512 tokens and writes 64 more, the likeliest each time, on the
same threads. llama.cpp reads the weights from a GGUF file in float32, bfloat16, q8_0 or q4_0 (all matrices alike, by
the package gguf). Headloom reads them from a run that it imports from a folder as transformers writes it, and runs
`generate` in float32, in bfloat16, and in bfloat16 with int8 or int4 weights. The two take turns, each in a process of
its own that has loaded the weights and computed nothing before. "prefill" is therefore the first prompt of a process,
which also takes its memory from the system. "again" is another prompt of 512 tokens in the same process: for Headloom
the second request to `serve`, which is timed by its client. The results are medians of tokens a second, and of
Headloom's over llama.cpp's. Targets: decoding at least 1 in every type, prefill at least 1.3, 2, 2.5 and 1.5.
"""

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch

try:
    import gguf
    import llama_cpp
    from safetensors.torch import save_file
except ImportError as error:
    sys.exit(f"{sys.argv[0]} needs llama.cpp: pip install llama-cpp-python gguf safetensors ({error}).")

ROOT = Path(__file__).resolve().parents[1]
WIDTH, DEPTH, HEADS, HIDDEN, VOCABULARY = 768, 12, 12, 2048, 32000
CONTEXT, TOKENS = 512, 64
# For each type: llama.cpp's, Headloom's options, and the least that prefill's ratio should be.
TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, [], 1.3),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, ["--dtype", "bfloat16"], 2.0),
    "int8": (gguf.GGMLQuantizationType.Q8_0, ["--dtype", "bfloat16", "--quantize", "int8"], 2.5),
    "int4": (gguf.GGMLQuantizationType.Q4_0, ["--dtype", "bfloat16", "--quantize", "int4"], 1.5),
}
LAYER = {  # names in GGUF and in transformers, [out, in]
    "attn_q": ("self_attn.q_proj", (WIDTH, WIDTH)),
    "attn_k": ("self_attn.k_proj", (WIDTH, WIDTH)),
    "attn_v": ("self_attn.v_proj", (WIDTH, WIDTH)),
    "attn_output": ("self_attn.o_proj", (WIDTH, WIDTH)),
    "ffn_gate": ("mlp.gate_proj", (HIDDEN, WIDTH)),
    "ffn_up": ("mlp.up_proj", (HIDDEN, WIDTH)),
    "ffn_down": ("mlp.down_proj", (WIDTH, HIDDEN)),
    "attn_norm": ("input_layernorm", (WIDTH,)),
    "ffn_norm": ("post_attention_layernorm", (WIDTH,)),
}


def weights():
    """Every tensor by its two names: (GGUF's, transformers', value)."""
    torch.manual_seed(1)
    shapes = [("token_embd", "model.embed_tokens", (VOCABULARY, WIDTH))]
    for i in range(DEPTH):
        shapes += [(f"blk.{i}.{ours}", f"model.layers.{i}.{theirs}", s) for ours, (theirs, s) in LAYER.items()]
    shapes += [("output_norm", "model.norm", (WIDTH,)), ("output", "lm_head", (VOCABULARY, WIDTH))]
    for short, long, shape in shapes:
        yield short, long, torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape)


def write_gguf(path, kind):
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(2 * CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(DEPTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("no_vocab")
    for name, _, value in weights():
        if name.endswith(("attn_q", "attn_k")):  # in GGUF the rotary pairs are neighbours
            value = value.view(HEADS, 2, -1, WIDTH).transpose(1, 2).reshape(value.shape)
        value = value.numpy()
        raw = kind if value.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(value, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_run(folder, program):
    """A folder as transformers writes it, imported."""
    source = folder / "llama"
    source.mkdir()
    config = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=HIDDEN,
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * CONTEXT,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
        torch_dtype="float32",
    )
    (source / "config.json").write_text(json.dumps(config))
    save_file({f"{name}.weight": value for _, name, value in weights()}, source / "model.safetensors")
    # A token for each byte, in byte-level BPE's spelling, and words that no text has.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    vocabulary = {chr(b): i for i, b in enumerate(printable)}
    vocabulary |= {chr(256 + n): len(printable) + n for n in range(len(others))}
    vocabulary |= {f"word{i}": i for i in range(256, VOCABULARY)}
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    tokenizer = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[],
        normalizer=None,
        pre_tokenizer=level,
        post_processor=None,
        decoder=level,
        model=dict(type="BPE", vocab=vocabulary, merges=[]),
    )
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    run = folder / "run"
    subprocess.run([program, "import", source, "--out", run], check=True, capture_output=True)
    return run


def theirs_here(path, threads):
    """Tokens a second of prefill, of decoding and of prefill again, in this process."""
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, None)
    parameters = llama_cpp.llama_model_default_params()
    parameters.n_gpu_layers = 0
    parameters.use_mmap = False  # all weights are in memory before the first token
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp cannot read {path}.")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = 2 * CONTEXT, CONTEXT, CONTEXT
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)

    def decode(tokens):
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        if llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) != 0:
            raise SystemExit("llama.cpp cannot decode.")
        logits = llama_cpp.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (VOCABULARY,)).argmax())

    start = time.perf_counter()
    token = decode([97] * CONTEXT)
    begun = time.perf_counter()
    for _ in range(TOKENS):
        token = decode([token])
    end = time.perf_counter()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    again = time.perf_counter()
    decode([98] * CONTEXT)
    return CONTEXT / (begun - start), TOKENS / (end - begun), CONTEXT / (time.perf_counter() - again)


def theirs(path, threads):
    command = [sys.executable, __file__, "--theirs", path, "--threads", threads]
    done = subprocess.run([str(c) for c in command], check=True, capture_output=True)
    return tuple(map(float, done.stdout.split()))


def ours(program, run, options, threads):
    """The same of Headloom's program."""
    command = [program, "generate", run, "--prompt", "a" * CONTEXT, "--tokens", TOKENS, "--temperature", 0, *options]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([str(c) for c in command], check=True, capture_output=True, env=environment)
    said = re.search(r"prompt: (\d+) tokens, ([\d.]+) tokens/s; text: (\d+) tokens, ([\d.]+)", done.stderr.decode())
    if int(said[1]) != CONTEXT:
        raise SystemExit(f"the prompt has {said[1]} tokens, expected {CONTEXT}.")
    return float(said[2]), float(said[4]), second_prompt(program, run, options, environment)


def second_prompt(program, run, options, environment):
    command = [str(c) for c in (program, "serve", run, "--port", 0, *options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            for letter in "ab":
                asked = json.dumps(dict(prompt=letter * CONTEXT, max_tokens=1, temperature=0)).encode()
                request = urllib.request.Request(f"{url}/completions", asked, {"Content-Type": "application/json"})
                start = time.perf_counter()
                urllib.request.urlopen(request).read()
                seconds = time.perf_counter() - start
        finally:
            server.terminate()
    return CONTEXT / seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TYPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--program", type=Path, default=ROOT / "build/bin/headloom")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--theirs", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.theirs:
        print(*theirs_here(arguments.theirs, arguments.threads))
        return
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder), arguments.program)
        for name, (kind, options, target) in TYPES.items():
            if arguments.only not in (None, name):
                continue
            path = Path(folder) / f"{name}.gguf"
            write_gguf(path, kind)
            ours(arguments.program, run, options, arguments.threads)  # the first on a machine chooses its products' routes
            pairs = [
                (ours(arguments.program, run, options, arguments.threads), theirs(path, arguments.threads))
                for _ in range(arguments.rounds)
            ]
            path.unlink()
            results[name] = {"prefill_target": target}
            for i, what in enumerate(("prefill", "decode", "again")):
                ratios = [a[i] / b[i] for a, b in pairs]
                results[name][what] = {
                    "headloom": statistics.median(a[i] for a, _ in pairs),
                    "llama.cpp": statistics.median(b[i] for _, b in pairs),
                    "ratio": statistics.median(ratios),
                    "range": [min(ratios), max(ratios)],
                }
    if arguments.json:
        print(json.dumps({"threads": arguments.threads, "llama_cpp": llama_cpp.__version__, "types": results}, indent=1))
        return
    print(f"134M parameters, context {CONTEXT}, {arguments.threads} threads; tokens a second, ours over theirs")
    for name, r in results.items():
        for what, target in (("prefill", r["prefill_target"]), ("again", r["prefill_target"]), ("decode", 1.0)):
            m = r[what]
            verdict = "PASS" if m["ratio"] >= target else "short of"
            print(
                f"{name:9} {what:8} headloom {m['headloom']:7.1f}, llama.cpp {m['llama.cpp']:7.1f}, ratio "
                f"{m['ratio']:.2f} ({m['range'][0]:.2f} - {m['range'][1]:.2f}), {verdict} {target}"
            )


if __name__ == "__main__":
    main()
