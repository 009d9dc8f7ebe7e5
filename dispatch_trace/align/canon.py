"""The canonical form of an op graph: which ops only move values about, and which names mean one thing.

Half of what a dispatcher shows are views, clones and casts. They are *edges* here: an op behind them reads
what stands before them. The tables hold facts about ATen ops, nothing about any model.
"""

from __future__ import annotations

from functools import cache

from dispatch_trace.schema import StoredRecord, StoredSlot


def _names(table: str) -> frozenset[str]:
    return frozenset(table.split())


# Every element keeps its place in logical order.
SAME_ORDER = _names(
    """
    view _unsafe_view reshape _reshape_alias _reshape_copy view_copy unsqueeze squeeze unsqueeze_copy
    squeeze_copy flatten unflatten clone detach alias contiguous lift lift_fresh lift_fresh_copy
    positive _to_copy to type_as view_as copy _lazy_clone _conj_copy detach_copy alias_copy resolve_conj
    resolve_neg
    """
)
# Elements move, repeat or drop out, and none changes.
REORDERING = _names(
    """
    t transpose permute slice select split split_with_sizes chunk unbind narrow expand expand_as
    diagonal as_strided unfold movedim swapaxes swapdims numpy_T mT adjoint t_copy transpose_copy
    permute_copy slice_copy select_copy split_copy unbind_copy expand_copy real imag view_as_real
    view_as_complex unsafe_split unsafe_chunk unsafe_split_with_sizes values indices tensor_split hsplit
    vsplit squeeze_dims
    """
)
# Allocate without writing; what is in there is nobody's value.
EMPTY = _names(
    """
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided empty_quantized
    """
)
# Copies of selected elements: exact, and a value of its own.
GATHERS = _names(
    """
    embedding index index_select gather take take_along_dim masked_select cat stack hstack vstack repeat
    repeat_interleave roll flip rot90 pad constant_pad_nd tril triu masked_fill where scatter
    slice_scatter select_scatter diagonal_scatter as_strided_scatter index_copy index_put
    _index_put_impl _unsafe_index _unsafe_index_put index_fill masked_scatter fill zero tile block_diag
    one_hot nonzero diag_embed diag pixel_shuffle pixel_unshuffle channel_shuffle reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d col2im im2col concat concatenate rescale
    """
)
# Exact besides: no rounding happens in them.
EXACT = GATHERS | _names(
    """
    relu neg abs maximum minimum max min amax amin clamp clamp_min clamp_max hardtanh max_pool2d
    max_pool2d_with_indices max_pool1d topk sort sgn sign leaky_relu threshold threshold_backward relu6
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    kthvalue __and__ __or__ __xor__ __lshift__ __rshift__ bitwise_left_shift bitwise_right_shift eq ne
    lt le gt ge isnan isinf isfinite argmax argmin argsort any all median mode cummax cummin
    count_nonzero round floor ceil trunc frac floor_divide remainder fmod nan_to_num arange
    """
)
# A small change of the input may change the output as a whole.
DISCRETE = _names(
    """
    argmax argmin argsort topk sort eq ne lt le gt ge sign sgn round floor ceil trunc floor_divide
    remainder fmod frac bucketize searchsorted nonzero unique _unique2 unique_consecutive unique_dim
    multinomial bincount histc kthvalue mode median quantize_per_tensor quantize_per_channel
    fake_quantize_per_tensor_affine isnan isinf isfinite any all logical_and logical_or logical_not
    logical_xor count_nonzero fake_quantize_per_tensor_affine_cachemask
    fake_quantize_per_channel_affine_cachemask
    """
)
# To integers these cut off what is behind the point.
CASTS = _names("_to_copy to type_as")
# Beside elements that hardly change, integers that say which they are: these are decisions.
CHOOSING = _names(
    """
    max min cummax cummin median nanmedian max_pool1d_with_indices max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    fractional_max_pool2d fractional_max_pool3d
    """
)
# How many elements come out, and which, follows from values.
SIZED_BY_VALUES = _names(
    """
    nonzero masked_select unique _unique2 unique_consecutive unique_dim repeat_interleave
    """
)
# The result is the first operand with other values in some places.
WRITE_INTO = _names(
    """
    index_put _index_put_impl _unsafe_index_put index_copy index_add index_fill index_reduce scatter
    scatter_add scatter_reduce masked_scatter copy slice_scatter select_scatter
    """
)
# How far an error may grow is not known from norms.
ILL_CONDITIONED = _names(
    """
    linalg_inv_ex linalg_inv inverse linalg_solve _linalg_solve_ex linalg_eigh _linalg_eigh linalg_eig
    _linalg_svd linalg_svd linalg_qr linalg_cholesky_ex linalg_lu_factor_ex linalg_lstsq linalg_pinv
    linalg_det _linalg_det logdet slogdet _linalg_slogdet
    """
)
# In-place or not, these read nothing: their result is a leaf of the program.
_FACTORY = _names(
    """
    arange zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full eye linspace
    logspace scalar_tensor tril_indices triu_indices hann_window hamming_window zero fill
    _efficientzerotensor rand randn randint randperm rand_like randn_like randint_like normal uniform
    bernoulli random exponential cauchy log_normal geometric
    """
)

_FAMILIES: dict[str, str] = {
    name: family
    for family, names in {
        "linear": "mm addmm linear bmm matmul baddbmm addbmm mv addmv dot vdot _int_mm _scaled_mm einsum "
        "inner _addmm_activation _weight_int8pack_mm _weight_int4pack_mm mkldnn_linear "
        "mkldnn_linear_pointwise chain_matmul",
        "conv": "convolution _convolution convolution_overrideable conv1d conv2d conv3d mkldnn_convolution "
        "cudnn_convolution _conv_depthwise2d slow_conv2d_forward thnn_conv2d mkldnn_convolution_pointwise "
        "convolution_pointwise conv_transpose1d conv_transpose2d",
        "attention": "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps "
        "_flash_attention_forward _efficient_attention_forward",
        "layer_norm": "native_layer_norm layer_norm",
        "rms_norm": "rms_norm _fused_rms_norm",
        "group_norm": "native_group_norm group_norm",
        "batch_norm": "native_batch_norm batch_norm _native_batch_norm_legit _batch_norm_with_update "
        "_native_batch_norm_legit_no_training _native_batch_norm_legit_functional cudnn_batch_norm "
        "miopen_batch_norm _batch_norm_impl_index",
        "softmax": "_softmax softmax _safe_softmax",
        "log_softmax": "_log_softmax log_softmax",
        "silu": "silu swish",
        "gelu": "gelu",
        "concat": "cat stack concat concatenate hstack vstack",
        "and": "bitwise_and logical_and __and__",
        "or": "bitwise_or logical_or __or__",
        "not": "bitwise_not logical_not",
        "embedding": "embedding index_select",
        "dropout": "native_dropout dropout",
        "reduce_max": "amax max",
        "reduce_min": "amin min",
        "repeat": "repeat tile",
        "fill": "zero fill",
        "sub": "sub rsub",
        "square": "square",
    }.items()
    for name in names.split()
}

# By family: activations that are one op. What is written out in parts may hold none of them.
WHOLE_ACTIVATIONS = _names(
    """
    gelu silu relu elu selu celu leaky_relu relu6 hardswish hardtanh hardsigmoid mish softplus
    log_sigmoid_forward rrelu prelu _prelu_kernel
    """
)
# By family: no product, sum or scale makes the result of one of these of that of another.
NONLINEAR = WHOLE_ACTIVATIONS | _names(
    """
    tanh sigmoid softmax log_softmax logsumexp attention exp exp2 expm1 log log1p log2 log10 erf erfc sqrt
    rsqrt pow square reciprocal sin cos tan atan atan2 sinh cosh abs clamp clamp_min clamp_max layer_norm
    rms_norm group_norm batch_norm cumprod
    """
)


@cache
def short(op: str) -> str:
    """`mm` for `aten.mm`; other namespaces stay."""
    return op[5:] if op.startswith("aten.") else op


@cache
def family(op: str) -> str:
    """The name under which ops that compute the same thing stand."""
    name = short(op)
    return _FAMILIES.get(name, name)


@cache
def dtype_class(dtype: str) -> str:
    """ "f" float, "c" complex, "8" a float of 8 bits or fewer, "b" bool, "i" integer (quantised included)."""
    if dtype.startswith(("float8", "float4")):
        return "8"
    if dtype.startswith(("float", "bfloat")):
        return "f"
    if dtype.startswith("complex"):
        return "c"
    return "b" if dtype == "bool" else "i"


def decides(record: StoredRecord, out: StoredSlot) -> bool:
    """Whether a result is integers that an op made of what it compared or cast: noise may change them."""
    name = short(record.op)
    return dtype_class(out.dtype) in "ib" and (name in DISCRETE or name in CHOOSING or name in CASTS)


def is_empty(record: StoredRecord) -> bool:
    return short(record.op) in EMPTY


def is_factory(record: StoredRecord) -> bool:
    """Whether the op reads no value: its result is a constant of the program, or random."""
    if short(record.op) in _FACTORY:
        return True
    return not any(slot.role == "in" and slot.is_tensor for slot in record.slots)


def edge_input(record: StoredRecord) -> StoredSlot | None:
    """The input slot whose values an edge op hands on; None where the op computes something.

    A cast to an integer, to bool or to eight bits computes: it decides something.
    """
    if record.kind != "op":
        return None
    name = short(record.op)
    if name in EMPTY:
        return None
    inputs = [slot for slot in record.slots if slot.role == "in" and slot.is_tensor]
    if not inputs:
        return None
    if name == "copy":
        source = next((slot for slot in inputs if slot.name == "in.src"), None)
        target = next((slot for slot in record.slots if slot.role == "written"), None)
        if source is None or target is None or not hands_on(source.dtype, target.dtype):
            return None
        return source
    if record.light:
        return inputs[0]
    if name in SAME_ORDER or name in REORDERING:
        out = next((slot for slot in record.slots if slot.role == "out" and slot.is_tensor), None)
        if out is None or not hands_on(inputs[0].dtype, out.dtype):
            return None
        return inputs[0]
    return None


def hands_on(source: str, target: str) -> bool:
    """Whether a conversion between these dtypes keeps the value up to rounding."""
    before, after = dtype_class(source), dtype_class(target)
    if after == "f":
        return before != "c"
    if after == "c":
        return True
    return (before == after and (after != "8" or source == target)) or (before == "b" and after == "i")
