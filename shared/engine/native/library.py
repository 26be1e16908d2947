"""The compiled kernels as Python calls them, and the structures both sides share (see decoder.h, attention.h)."""

from __future__ import annotations

import ctypes
import functools
import logging
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

import torch

from shared.engine.native.build import CannotBuild, build

logger = logging.getLogger(__name__)


class Matrix(Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("group", c_int64),
        ("bits", c_int32),
    ]


class Pool(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("is_bf16", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("block_stride", c_int64),
        ("value_offset", c_int64),
        ("position_stride", c_int64),
        ("head_stride", c_int64),
        ("layer_stride", c_int64),
    ]


class Batch(Structure):
    _fields_ = [
        ("num_sequences", c_int64),
        ("num_tokens", c_int64),
        ("starts", c_void_p),
        ("lengths", c_void_p),
        ("first_tokens", c_void_p),
        ("first_blocks", c_void_p),
        ("tables", c_void_p),
        ("positions", c_void_p),
        ("tree_starts", c_void_p),
        ("first_parents", c_void_p),
        ("parents", c_void_p),
    ]


class Attention(Structure):
    _fields_ = [
        ("num_heads", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    ]


class Layer(Structure):
    _fields_ = [
        ("attention_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("attention_out_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_out_norm", c_void_p),
        ("qkv", Matrix),
        ("attention_out", Matrix),
        ("gate_up", Matrix),
        ("mlp_out", Matrix),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("attention", Attention),
    ]


class Decoder(Structure):
    _fields_ = [
        ("embedding", c_void_p),
        ("head", Matrix),
        ("final_norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("mlp", c_int32),
        ("num_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("activation", c_int32),
        ("norm_eps", c_float),
        ("embedding_scale", c_float),
        ("logit_softcap", c_float),
    ]


class Captures(Structure):
    _fields_ = [("layers", c_void_p), ("num", c_int64), ("out", c_void_p)]


class Heads(Structure):
    _fields_ = [("data", c_void_p), ("token_stride", c_int64), ("head_stride", c_int64)]


_STRUCTURES = (Matrix, Pool, Batch, Attention, Layer, Decoder, Captures)


class Library:
    """The kernels' functions; what they take is said in kernels.cpp. Raises CannotBuild if `path` is not they."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            sizes = library.outrider_sizes
            sizes.restype = c_int64
            if [sizes(i) for i in range(len(_STRUCTURES))] != [ctypes.sizeof(each) for each in _STRUCTURES]:
                raise CannotBuild(f"{path.name} lays its structures out in another way")
            self.packed_size = library.outrider_packed_size
            self.packed_size.argtypes, self.packed_size.restype = [c_int64, c_int64, c_int], c_int64
            self.pack = library.outrider_pack
            self.pack.argtypes, self.pack.restype = [c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int], None
            self.pack_quantised = library.outrider_pack_quantised
            self.pack_quantised.argtypes = [c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p, c_int]
            self.pack_quantised.restype = None
            self.linear = library.outrider_linear
            self.linear.argtypes, self.linear.restype = [c_void_p, c_void_p, c_int64, c_void_p, c_int], None
            self.likeliest = library.outrider_likeliest
            self.likeliest.argtypes = [*[c_void_p] * 3, *[c_int64] * 3, *[c_void_p] * 2, c_int]
            self.likeliest.restype = None
            self.drawn = library.outrider_drawn
            self.drawn.argtypes = [*[c_void_p] * 3, *[c_int64] * 2, c_void_p, c_int]
            self.drawn.restype = None
            self.drawn_unseeded = library.outrider_drawn_unseeded
            self.drawn_unseeded.argtypes = [*[c_void_p] * 3, *[c_int64] * 2, c_void_p, c_int]
            self.drawn_unseeded.restype = None
            self.attend = library.outrider_attend
            self.attend.argtypes = [c_void_p, c_void_p, c_int, *[c_void_p] * 5, c_int]
            self.attend.restype = None
            self.forward = library.outrider_forward
            self.forward.argtypes = [*[c_void_p] * 5, c_int64, *[c_void_p] * 2, c_int]
            self.forward.restype = None
        except (OSError, AttributeError) as error:
            raise CannotBuild(f"{path} cannot be loaded: {error}") from error


@functools.cache
def load_library() -> Library | None:
    """The kernels for this machine, compiled if they were not yet; None, and a line in the log, if there are none."""
    try:
        path = build()
        library = Library(path)
    except CannotBuild as error:
        logger.warning("no kernels of its own for this CPU, PyTorch's serve: %s", error)
        return None
    logger.info("kernels of its own serve", extra={"library": path.name})
    return library


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there may be kernels for models of this type there."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)
