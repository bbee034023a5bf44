"""Headloom: the Transformer's structural variants, run in C++ on LibTorch.

``load`` reads a trained model and ``model`` makes a new one; ``mixer`` and ``channel_mixer`` build single layers: all are
ordinary ``torch.nn.Module``s. ``composed_attention`` is attention whose maps are convolved and mixed across heads; the other
operators are in ``headloom.ops``. ``headloom.analysis`` looks into models. ``headloom.transformers`` and ``headloom.lm_eval``
fit into those libraries.
"""

from headloom import _library as _library  # loads the operators
from headloom import _flops as _flops  # says what the operators cost
from headloom import analysis, gpu as gpu, ops
from headloom._compare import compare
from headloom._decoding import State
from headloom._model import Model, Preset, load, model, presets
from headloom._tensorboard import tensorboard
from headloom._tokenizer import Tokenizer
from headloom._training import balance_experts, keep_freed_memory, parameter_groups, redraw_features
from headloom.attention import HeadMix, composed_attention
from headloom.mixers import (
    ChannelMixer,
    Mixer,
    MixerInfo,
    Option,
    channel_mixer,
    channel_mixers,
    mixer,
    mixers,
)

__all__ = [
    "ChannelMixer",
    "HeadMix",
    "Mixer",
    "MixerInfo",
    "Model",
    "Option",
    "Preset",
    "State",
    "Tokenizer",
    "analysis",
    "balance_experts",
    "channel_mixer",
    "channel_mixers",
    "compare",
    "composed_attention",
    "keep_freed_memory",
    "load",
    "mixer",
    "mixers",
    "model",
    "ops",
    "parameter_groups",
    "presets",
    "redraw_features",
    "tensorboard",
]
__version__ = "0.1.0"
