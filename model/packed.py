"""Weights in the order in which the CPU's kernels read them, and a runner that uses them.

A decoded token reads every weight once, so a step is as fast as memory. The outputs of a layer lie
in panels of 16: for each input, the weights of all 16; in 16 or 8 bits for every two inputs,
pairwise. `pack` puts each matrix of a network into this order and lets go of the other copy.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model import kernel, pages
from model.batch import Batch
from model.config import GPTConfig
from model.gpt import GPT
from model.quantise import Int8Embedding, Int8Linear
from model.runner import Runner


class PackedLinear(nn.Module):
    """A linear layer whose weight `(n, k)` is float32, bfloat16, or int8 with the scale of each
    output; k is a multiple of 4. Sums are float32.

    With int8 weights a token's inputs become int16, the largest of them 32,767: whole numbers are
    multiplied faster. With `round_inputs` they become bfloat16, as bfloat16 weights are.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        *,
        round_inputs: bool = False,
    ) -> None:
        super().__init__()
        n, k = weight.shape
        if k % kernel.STRIDE:
            raise ValueError(f"{k} inputs are no multiple of {kernel.STRIDE}")
        if (weight.dtype is torch.int8) != (scale is not None):
            raise ValueError("int8 weights have a scale, and no others")
        together = 1 if weight.dtype is torch.float32 else 2  # inputs
        panels = -(-n // kernel.LANES)
        self.panels = pages.empty((panels, k // together, kernel.LANES, together), weight.dtype)
        whole = F.pad(weight.detach(), (0, 0, 0, -n % kernel.LANES))
        self.panels.copy_(whole.reshape(panels, kernel.LANES, -1, together).transpose(1, 2))
        self.scale = scale
        self.bias = None if bias is None else bias.detach().float()
        self.layer = kernel.Linear(
            *(self.panels.data_ptr(), _pointer(self.scale), _pointer(self.bias)),
            *(n, k, kernel.BFLOAT16_BOTH if round_inputs else kernel.TYPES[weight.dtype]),
        )

    def forward(self, x: Tensor) -> Tensor:
        return kernel.linear(self.layer, x)


class PackedEmbedding(nn.Module):
    """The rows of a packed layer, in float32."""

    def __init__(self, rows: PackedLinear) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, tokens: Tensor) -> Tensor:
        panel, lane = tokens // kernel.LANES, tokens % kernel.LANES
        rows = self.rows.panels[panel, :, lane].flatten(-2).float()
        return rows if self.rows.scale is None else rows * self.rows.scale[tokens, None]


def available(config: GPTConfig) -> bool:
    """Whether there are kernels for this CPU, and they are made for this shape."""
    fits = config.d_model % kernel.STRIDE == config.d_ff % kernel.STRIDE == 0
    return fits and kernel.library() is not None


def pack(model: GPT) -> None:
    """Pack every matrix of a network on the CPU, in place; all other numbers become float32."""
    n_vocab = model.config.n_vocab
    for block in model.h:
        for part, names in ((block.attn, ("c_attn", "c_proj")), (block.mlp, ("c_fc", "c_proj"))):
            for name in names:
                setattr(part, name, _packed(getattr(part, name)))
    head = _packed(model.lm_head, n_vocab)
    rows = head if model.config.tied_head else _packed(model.wte, n_vocab)
    model.lm_head, model.wte = head, PackedEmbedding(rows)  # type: ignore[assignment]
    model.float()


def is_packed(model: GPT) -> bool:
    return isinstance(model.get_submodule("lm_head"), PackedLinear)


def weight_bytes(model: GPT) -> int:
    """Bytes of one number of its matrices, as they lie in memory; the least, where they differ."""
    packed = [m.panels for m in model.modules() if isinstance(m, PackedLinear)]
    return min(weight.itemsize for weight in packed or [model.state_dict()["lm_head.weight"]])


def _packed(
    layer: nn.Linear | nn.Embedding | Int8Linear | Int8Embedding, n: int | None = None
) -> PackedLinear:
    """The first `n` outputs, or rows, of a layer."""
    if isinstance(layer, Int8Embedding):
        layer = layer.linear
    scale = layer.scale[:n] if isinstance(layer, Int8Linear) else None
    bias = None if isinstance(layer, nn.Embedding) else layer.bias
    weight = layer.weight[:n]
    rounds = weight.dtype is torch.bfloat16 and kernel.multiplies_bfloat16()
    return PackedLinear(_narrowed(weight), scale, bias, round_inputs=rounds)


def _narrowed(weight: Tensor) -> Tensor:
    """float32 that was bfloat16 once, as it was: half as much to read for the very same sums."""
    if weight.dtype is not torch.float32:
        return weight
    for part in (weight[:1], weight):  # what does not fit mostly shows it in its first row
        if not torch.equal(part.bfloat16().float(), part):
            return weight
    return weight.bfloat16()


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


class PackedRunner(Runner):
    """Runs a packed network: a step is one call into the kernels."""

    def __init__(self, model: GPT, n_rows: int, kv_dtype: torch.dtype = torch.float32) -> None:
        """`model` is packed, and stays alive and as it is."""
        super().__init__(model, n_rows, kv_dtype, kernel.attend)
        c, embedding = model.config, model.get_submodule("wte.rows")
        self._layers = (kernel.Layer * c.n_layer)(*(_layer(block) for block in model.h))
        network = kernel.Model(
            layers=self._layers,
            wpe=model.wpe.weight.data_ptr(),
            ln_f=_norm(model.ln_f),
            wte=_linear(embedding),
            n_layer=c.n_layer,
            d_model=c.d_model,
            d_ff=c.d_ff,
            activation=kernel.ACTIVATIONS[c.activation],
            norm_first=c.norm_first,
            epsilon=c.norm_epsilon,
        )
        self._network = kernel.Network(network, self.kv, c.n_head)

    def hidden(self, batch: Batch) -> Tensor:
        return self._network.hidden(batch)


def _layer(block: nn.Module) -> kernel.Layer:
    return kernel.Layer(
        ln_1=_norm(block.get_submodule("ln_1")),
        ln_2=_norm(block.get_submodule("ln_2")),
        c_attn=_linear(block.get_submodule("attn.c_attn")),
        attn_proj=_linear(block.get_submodule("attn.c_proj")),
        c_fc=_linear(block.get_submodule("mlp.c_fc")),
        mlp_proj=_linear(block.get_submodule("mlp.c_proj")),
    )


def _linear(layer: nn.Module) -> kernel.Linear:
    if not isinstance(layer, PackedLinear):
        raise TypeError("the network is not packed")
    return layer.layer


def _norm(norm: nn.Module) -> kernel.Norm:
    if not isinstance(norm, nn.LayerNorm):
        return kernel.Norm()
    return kernel.Norm(norm.weight.data_ptr(), norm.bias.data_ptr())
