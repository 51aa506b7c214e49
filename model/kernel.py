"""Calls `kernel.c`, compiled when the package was installed. Where it is not there, torch does all.

The structures are those of the C file, field by field. Numbers are float32 in contiguous tensors on
the CPU, which whoever calls keeps alive.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from ctypes import c_float, c_int, c_int32, c_long, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from model.attention import Plan
from model.batch import Batch

log = logging.getLogger(__name__)

VERSION = 3  # of the structures and calls, as in kernel.c
FLOAT32, BFLOAT16, INT8, BFLOAT16_BOTH = range(4)
TYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8}
ACTIVATIONS = {"none": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
LANES = 16  # outputs of a panel
STRIDE = 4  # inputs of a layer come in multiples of it

# The libraries; each next one runs wherever the one before does.
LIBRARIES = ("_kernel_avx512bf16", "_kernel_avx512", "_kernel_avx2", "_kernel")


class Linear(ctypes.Structure):
    _fields_ = (
        ("panels", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("type", c_int32),
    )


class Norm(ctypes.Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Layer(ctypes.Structure):
    _fields_ = (
        ("ln_1", Norm),
        ("ln_2", Norm),
        ("c_attn", Linear),
        ("attn_proj", Linear),
        ("c_fc", Linear),
        ("mlp_proj", Linear),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("wpe", c_void_p),
        ("ln_f", Norm),
        ("wte", Linear),
        ("n_layer", c_int32),
        ("d_model", c_int32),
        ("d_ff", c_int32),
        ("activation", c_int32),
        ("norm_first", c_int32),
        ("epsilon", c_float),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("write", c_void_p),
        ("queries", c_void_p),
        ("keys", c_void_p),
        ("rows", c_void_p),
        ("n_tokens", c_int32),
        ("n_sequences", c_int32),
        ("n_keys", c_int32),
    )


class _Pool(ctypes.Structure):
    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("type", c_int32),
        ("n_head", c_int32),
        ("n_kv_head", c_int32),
        ("d_head", c_int32),
    )


def fitting() -> tuple[str, ...]:
    """Those of LIBRARIES that run on this CPU, as torch knows it, the best first."""
    known = {"AVX512": 1, "AVX2": 2}
    first = known.get(torch.backends.cpu.get_cpu_capability(), 3)
    if first == 1 and torch.cpu._is_avx512_bf16_supported():
        first = 0  # all that have it have VNNI, too
    return LIBRARIES[first:]


@cache
def library() -> ctypes.CDLL | None:
    """The library for this CPU; None if none was compiled.

    It lies beside this file or, when this file is a working tree's, where the package is installed.
    """
    for name in fitting():
        for folder in (Path(__file__).parent, *(Path(entry) / "model" for entry in sys.path)):
            for path in (folder / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES):
                if path.exists() and (found := _load(path)):
                    return found
    return None


def _load(path: Path) -> ctypes.CDLL | None:
    try:
        found = ctypes.CDLL(str(path))
        fits = found.onerow_version() == VERSION
    except (OSError, AttributeError) as error:
        log.warning("%s cannot be used: %s", path, error)
        return None
    if not fits:
        return None  # of another version of the package
    found.onerow_linear.argtypes = (c_void_p, c_void_p, c_int, c_void_p, c_void_p, c_int)
    found.onerow_attend_scratch.argtypes = (c_void_p, c_int, c_int)
    found.onerow_attend_scratch.restype = c_long
    found.onerow_attend.argtypes = (
        *(c_void_p, c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_long),
        *(c_void_p, c_void_p, c_int),
    )
    found.onerow_forward_scratch.argtypes = (c_void_p, c_void_p, c_int, c_int, c_int)
    found.onerow_forward_scratch.restype = c_long
    found.onerow_forward.argtypes = (
        *(c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_void_p, c_int),
    )
    return found


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies pairs of bfloat16, which is faster than to widen one of them."""
    return bool(_here().onerow_multiplies_bfloat16())


def linear(layer: Linear, x: Tensor) -> Tensor:
    """x `(T, k)` -> `(T, n)`."""
    n_tokens, _ = x.shape
    x, y = x.contiguous(), torch.empty(n_tokens, layer.n)
    scratch = torch.empty_like(x)
    _here().onerow_linear(
        *(ctypes.byref(layer), x.data_ptr(), n_tokens),
        *(scratch.data_ptr(), y.data_ptr(), torch.get_num_threads()),
    )
    return y


def attend(q: Tensor, k: Tensor, v: Tensor, pool_layer: Tensor, plan: Plan) -> Tensor:
    """`model.attention.attend`, reading rows where they lie: what a network does between two
    layers, by itself.
    """
    q, k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (q, k, v))
    if k.stride(0) != v.stride(0):
        k, v = k.contiguous(), v.contiguous()
    lib, threads = _here(), torch.get_num_threads()
    pool, batch = _pool(pool_layer, q.shape[1]), _batch(plan)
    scratch = torch.empty(lib.onerow_attend_scratch(ctypes.byref(pool), batch.n_keys, threads))
    out = torch.empty(q.shape)
    lib.onerow_attend(
        *(ctypes.byref(pool), ctypes.byref(batch), q.data_ptr(), q.stride(0)),
        *(k.data_ptr(), v.data_ptr(), k.stride(0)),
        *(scratch.data_ptr(), out.data_ptr(), threads),
    )
    return out


class Network:
    """A packed network and its rows, `kv[layer, key|value, row, n_kv_head, d_head]`."""

    def __init__(self, model: Model, kv: Tensor, n_head: int) -> None:
        self._lib, self._model = _here(), model
        self._pool, self._layer_bytes = _pool(kv[0], n_head), kv.stride(0) * kv.itemsize
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def hidden(self, batch: Batch) -> Tensor:
        """Hidden states `(T, d_model)`, ready for the head."""
        step, threads = _batch(batch.plan, batch.tokens, batch.positions), torch.get_num_threads()
        needed = self._lib.onerow_forward_scratch(
            *(ctypes.byref(self._model), ctypes.byref(self._pool)),
            *(step.n_tokens, step.n_keys, threads),
        )
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        hidden = torch.empty(step.n_tokens, self._model.d_model)
        self._lib.onerow_forward(
            *(ctypes.byref(self._model), ctypes.byref(self._pool), self._layer_bytes),
            *(ctypes.byref(step), self._scratch.data_ptr(), hidden.data_ptr(), threads),
        )
        return hidden


def _here() -> ctypes.CDLL:
    found = library()
    if found is None:
        raise RuntimeError("the compiled kernels are not there")
    return found


def _pool(layer: Tensor, n_head: int) -> _Pool:
    keys, values = layer
    _, n_kv_head, d_head = keys.shape
    return _Pool(keys.data_ptr(), values.data_ptr(), TYPES[layer.dtype], n_head, n_kv_head, d_head)


def _batch(plan: Plan, tokens: Tensor | None = None, positions: Tensor | None = None) -> _Batch:
    if not plan.write.dtype == plan.rows.dtype == torch.int32:
        raise TypeError("row numbers are int32")
    return _Batch(
        None if tokens is None else tokens.data_ptr(),
        None if positions is None else positions.data_ptr(),
        plan.write.data_ptr(),
        plan.queries.__array_interface__["data"][0],
        plan.keys.__array_interface__["data"][0],
        plan.rows.data_ptr(),
        plan.write.numel(),
        len(plan.queries) - 1,
        int((plan.keys[1:] - plan.keys[:-1]).max()),
    )
