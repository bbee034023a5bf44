"""Tiny models of every kind, and what they read, for the tests of models."""

import headloom
import torch

VOCABULARY, WIDTH, LENGTH = 40, 32, 9
SHAPE = dict(width=WIDTH, depth=2, vocabulary=VOCABULARY, max_length=24)
ATTENTION = {"heads": 4}


def layer(mixer="mha", channel="swiglu", **block):
    options = ATTENTION if "heads" in headloom.mixers()[mixer].options else {}
    return {"mixer": {"type": mixer, **options}, "channel": {"type": channel}, **block}


def decoder(**options):
    return headloom.model(**{**SHAPE, "layer": [layer()], **options})


EXPERTS = {"type": "moe", "routed": 4, "active": 2, "shared": 1, "hidden": 16, "balance": 0.1}
BALANCED = {**EXPERTS, "scores": "sigmoid", "bias_speed": 0.01}
# One of each way in which a model keeps parameters.
DECODERS = {
    "tied": dict(),
    "untied": dict(tied=False, output_bias=True),
    "learned positions": dict(position={"type": "learned"}, embedding_norm=True, output_bias=True, norm="layer_norm"),
    "dcmha": dict(layer=[layer("dcmha")]),
    "rwkv": dict(layer=[layer("rwkv", "rwkv_channel")], position={"type": "none"}, norm="layer_norm"),
    "mamba": dict(layer=[layer("mamba", "none")]),
    "experts": dict(layer=[{"mixer": {"type": "mha", "heads": 4}, "channel": EXPERTS}]),
    "balanced": dict(layer=[{"mixer": {"type": "mha", "heads": 4}, "channel": BALANCED}]),
    "simplified": dict(layer=[layer("shaped", "mlp", block={"type": "simplified"})]),
    "parallel": dict(layer=[layer(block={"type": "parallel"})], bias=True),
}
OTHERS = {
    "encoder": dict(kind="encoder", head="tokens", segments=2, transform=True, layer=[layer()]),
    "label": dict(kind="encoder", head="label", classes=3, pooler=True, layer=[layer()]),
    "tags": dict(kind="encoder", head="tags", classes=4, layer=[layer()]),
    "span": dict(kind="encoder", head="span", segments=2, layer=[layer()]),
    "linformer": dict(
        kind="encoder",
        head="tokens",
        layer=[{"mixer": {"type": "linformer", "heads": 4, "rank": 4, "sharing": "layerwise"}}],
    ),
    "auto_encoder": dict(kind="auto_encoder", layer=[layer()]),
    "encoder_decoder": dict(kind="encoder_decoder", max_source_length=24, layer=[layer("dcmha")]),
    "vit": dict(
        kind="vit",
        classes=5,
        pool="first",
        position={"type": "learned"},
        image={"channels": 3, "height": 8, "width": 8, "patch": 4},
        layer=[layer("dcmha", "mlp")],
        vocabulary=None,
        max_length=None,
    ),
}
KINDS = {**DECODERS, **OTHERS}


def make(kind, **options):
    return headloom.model(**{**SHAPE, "layer": [layer()], **KINDS[kind], **options})


def tokens(batch=2, length=LENGTH):
    return torch.randint(VOCABULARY, (batch, length))


def inputs(kind, batch=2, length=LENGTH):
    """Arguments of a call."""
    if kind == "vit":
        return (torch.randn(batch, 3, 8, 8),), {}
    if kind == "encoder_decoder":
        lengths = torch.full((batch,), 4)
        lengths[0] = length - 2
        return (tokens(batch, length),), {"source": tokens(batch, length - 2), "source_lengths": lengths}
    return (tokens(batch, length),), {}
