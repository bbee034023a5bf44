"""Headloom: the Transformer's structural variants, run in C++ on LibTorch.

``composed_attention`` is attention whose maps are convolved and mixed across heads; ``mixer`` builds whole layers
of it (and of its alternatives) as ordinary ``torch.nn.Module``s.
"""

from headloom import _library as _library  # loads the operators
from headloom.attention import HeadMix, composed_attention
from headloom.mixers import Mixer, MixerInfo, Option, mixer, mixers

__all__ = ["HeadMix", "Mixer", "MixerInfo", "Option", "composed_attention", "mixer", "mixers"]
__version__ = "0.1.0"

