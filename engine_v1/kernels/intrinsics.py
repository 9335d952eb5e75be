"""LLVM-level building blocks of the kernels: a 16-lane float vector, GEMM tiles, atomics.

Everything above this file is plain arithmetic in Python. What a CPU offers is decided here, once, when this module is
imported: bf16 dot products (AVX512-BF16) where there, otherwise bf16 widened to float32 and fused multiply-adds, which
LLVM lowers to whatever the host has. Nothing here names an instruction set unless the host has it.
"""

import operator
import os
import platform
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.extending import intrinsic, lower_builtin, register_model
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.np.arrayobj import populate_array

LANES = 16  # float32 lanes of a vector
TILE_COLUMNS = 32  # outputs per tile and row: two vectors
MAX_TILE_ROWS = 12  # 24 accumulators, 2 weight vectors and a broadcast fit the 32 registers of AVX-512
WIDE_TILE_ROWS = 6  # and so do 6 rows of 4 vectors: more independent sums, which hides the latency of each

_FEATURES = llvm.get_host_cpu_features()
IS_X86 = platform.machine().lower() in {"x86_64", "amd64"}
HAS_BF16_DOT = IS_X86 and _FEATURES.get("avx512bf16", False) and os.environ.get("ENGINE_V1_DISABLE_BF16_DOT") != "1"
HAS_INT8_DOT = IS_X86 and _FEATURES.get("avx512vnni", False) and os.environ.get("ENGINE_V1_DISABLE_INT8_DOT") != "1"
HAS_BYTE_PERMUTE = IS_X86 and _FEATURES.get("avx512vbmi", False)
HAS_F16 = not IS_X86 or _FEATURES.get("f16c", False) or _FEATURES.get("avx512f", False)
HAS_SCHED_YIELD = hasattr(os, "sched_yield")


def describe() -> str:
    """Return one line for the start-up print: which arithmetic the kernels of this process use."""
    bf16 = "AVX512-BF16 dot products" if HAS_BF16_DOT else "bf16 widened to float32 FMA"
    return f"CPU kernels for {llvm.get_host_cpu_name()}: {bf16}"


def describe_int8() -> str:
    """Return the same for products of 8-bit integers."""
    return "AVX512-VNNI dot products" if HAS_INT8_DOT else "8-bit integers widened to 32 bits"


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite's builder has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32 = ir.FloatType()
VF, VI, VI16 = (ir.VectorType(t, LANES) for t in (F32, I32, I16))
VBF = ir.VectorType(_BFloat(), LANES)
VBF_PAIRS = ir.VectorType(_BFloat(), 2 * LANES)


class F32x16Type(types.Type):
    """Sixteen float32 lanes, as a value in kernels."""

    def __init__(self) -> None:
        super().__init__("F32x16")


vec = F32x16Type()


@register_model(F32x16Type)
class _F32x16Model(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VF)


def call(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    """Emit a call of an LLVM intrinsic or C function by name."""
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def prefetch(builder: Any, pointer: Any, *, write: bool, locality: int) -> None:
    """Emit a request for the cache line at a pointer; locality is LLVM's, from 0 (the nearest cache alone) to 3."""
    flags = [ir.Constant(I32, n) for n in (int(write), locality, 1)]  # 1: data
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), [builder.bitcast(pointer, I8.as_pointer()), *flags])


def broadcast(builder: Any, scalar: Any, vector_type: Any) -> Any:
    """Emit a scalar in every lane."""
    undef = ir.Constant(vector_type, ir.Undefined)
    one = builder.insert_element(undef, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undef, ir.Constant(VI, [0] * LANES))


def const(value: float) -> Any:
    """Return a float32 constant in every lane."""
    return ir.Constant(VF, [value] * LANES)


def iconst(value: int, vector_type: Any = VI) -> Any:
    """Return an integer constant in every lane."""
    return ir.Constant(vector_type, [value] * LANES)


# -- vector operators ------------------------------------------------------------------------------------------------


def _register_operator(op: Callable[..., Any], emit: Callable[[Any, Any, Any], Any]) -> None:
    template = type("F32x16Op", (ConcreteTemplate,), {"key": op, "cases": [signature(vec, vec, vec)]})
    infer_global(op)(template)

    @lower_builtin(op, vec, vec)
    def _lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return emit(builder, args[0], args[1])


_register_operator(operator.add, lambda b, x, y: b.fadd(x, y))
_register_operator(operator.sub, lambda b, x, y: b.fsub(x, y))
_register_operator(operator.mul, lambda b, x, y: b.fmul(x, y))
_register_operator(operator.truediv, lambda b, x, y: b.fdiv(x, y))


def _vector_intrinsic(num_args: int, emit: Callable[..., Any]) -> Any:
    """An intrinsic from `num_args` vectors to a vector."""
    names = ", ".join("abc"[:num_args])
    scope = {"types": types, "vec": vec, "emit": emit}
    source = (
        f"def op(typingctx, {names}):\n"
        f"    def codegen(context, builder, sig, args):\n"
        f"        return emit(builder, *args)\n"
        f"    return vec({', '.join(['vec'] * num_args)}), codegen\n"
    )
    exec(source, scope)  # noqa: S102  (intrinsics need named arguments)
    return intrinsic(scope["op"])


def _emit_max(b: Any, x: Any, y: Any) -> Any:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _emit_finite(b: Any, x: Any) -> Any:
    bits = b.and_(b.bitcast(x, VI), iconst(0x7F800000))
    return b.select(b.icmp_unsigned("==", bits, iconst(0x7F800000)), const(0.0), x)


fma = _vector_intrinsic(3, lambda b, x, y, z: call(b, "llvm.fma.v16f32", VF, [x, y, z]))
maximum = _vector_intrinsic(2, _emit_max)  # y where either is NaN
minimum = _vector_intrinsic(2, lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))
finite_or_zero = _vector_intrinsic(1, _emit_finite)
absolute = _vector_intrinsic(1, lambda b, x: call(b, "llvm.fabs.v16f32", VF, [x]))
nearest_integer = _vector_intrinsic(1, lambda b, x: call(b, "llvm.rint.v16f32", VF, [x]))  # ties to even


@intrinsic
def where_greater(typingctx: Any, a: Any, b: Any, x: Any, y: Any) -> Any:
    """Lanes of x where a > b, of y elsewhere (NaN compares false)."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", args[0], args[1]), args[2], args[3])

    return vec(vec, vec, vec, vec), codegen


@intrinsic
def where_nan(typingctx: Any, a: Any, x: Any, y: Any) -> Any:
    """Lanes of x where a is NaN, of y elsewhere."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_unordered("uno", args[0], args[0]), args[1], args[2])

    return vec(vec, vec, vec), codegen


@intrinsic
def keep_range(typingctx: Any, a: Any, base: Any, low: Any, high: Any, other: Any) -> Any:
    """Lanes of a whose index base + lane lies in [low, high), of `other` elsewhere."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        lane = ir.Constant(VI, list(range(LANES)))
        first, last = (
            broadcast(builder, builder.trunc(builder.sub(bound, args[1]), I32), VI) for bound in (args[2], args[3])
        )
        inside = builder.and_(builder.icmp_signed(">=", lane, first), builder.icmp_signed("<", lane, last))
        return builder.select(inside, args[0], args[4])

    return vec(vec, types.intp, types.intp, types.intp, vec), codegen


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    """A number in every lane, rounded to float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return broadcast(builder, context.cast(builder, args[0], sig.args[0], types.float32), VF)

    return vec(value), codegen


@intrinsic
def lane_numbers(typingctx: Any) -> Any:
    """0, 1, ... 15."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return ir.Constant(VF, [float(i) for i in range(LANES)])

    return vec(), codegen


def _reduce(builder: Any, value: Any, emit: Callable[..., Any]) -> Any:
    """Halve the vector until one lane is left: an order that no compiler may change."""
    width = LANES // 2
    while width:
        mask = ir.Constant(VI, [i + width if i < width else i for i in range(LANES)])
        value = emit(builder, value, builder.shuffle_vector(value, value, mask))
        width //= 2
    return builder.extract_element(value, ir.Constant(I32, 0))


@intrinsic
def reduce_add(typingctx: Any, a: Any) -> Any:
    """Sum of the lanes, always in the same order."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _reduce(builder, args[0], lambda b, x, y: b.fadd(x, y))

    return types.float32(vec), codegen


@intrinsic
def reduce_max(typingctx: Any, a: Any) -> Any:
    """Largest lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return _reduce(builder, args[0], _emit_max)

    return types.float32(vec), codegen


@intrinsic
def first_lane(typingctx: Any, a: Any) -> Any:
    """Lane 0 as a number."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.extract_element(args[0], ir.Constant(I32, 0))

    return types.float32(vec), codegen


@intrinsic
def exp2_split(typingctx: Any, a: Any) -> Any:
    """(n, 2**n) with n = round(a), for a in [-126, 127]."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        n = call(builder, "llvm.rint.v16f32", VF, [args[0]])
        bits = builder.shl(builder.add(builder.fptosi(n, VI), iconst(127)), iconst(23))
        return context.make_tuple(builder, sig.return_type, [n, builder.bitcast(bits, VF)])

    return types.UniTuple(vec, 2)(vec), codegen


# -- memory ----------------------------------------------------------------------------------------------------------


def _element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


@intrinsic
def address(typingctx: Any, array: Any, index: Any) -> Any:
    """Byte address of element `index` of a flat array."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.ptrtoint(_element_pointer(context, builder, sig.args[0], args[0], args[1]), I64)

    return types.intp(array, types.intp), codegen


def _widen_bf16(builder: Any, half: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(half, VI), iconst(16)), VF)


def _round_bf16(builder: Any, value: Any) -> Any:
    """Nearest bf16, ties to even; NaN stays NaN."""
    if HAS_BF16_DOT:
        return builder.bitcast(call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", VBF, [value]), VI16)
    bits = builder.bitcast(value, VI)
    odd = builder.and_(builder.lshr(bits, iconst(16)), iconst(1))
    rounded = builder.lshr(builder.add(builder.add(bits, iconst(0x7FFF)), odd), iconst(16))
    quiet = builder.or_(builder.lshr(bits, iconst(16)), iconst(0x40))
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded), VI16)


@intrinsic
def load(typingctx: Any, array: Any, index: Any) -> Any:
    """Sixteen elements of a flat float32 array, or of a bf16 (uint16) array, widened."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, sig.args[0], args[0], args[1])
        if sig.args[0].dtype == types.uint16:
            half = builder.load(builder.bitcast(pointer, VI16.as_pointer()))
            half.align = 2
            return _widen_bf16(builder, half)
        value = builder.load(builder.bitcast(pointer, VF.as_pointer()))
        value.align = 4
        return value

    return vec(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Write sixteen elements to a flat float32 array, or rounded to a bf16 (uint16) array."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, sig.args[0], args[0], args[1])
        if sig.args[0].dtype == types.uint16:
            out = builder.store(_round_bf16(builder, args[2]), builder.bitcast(pointer, VI16.as_pointer()))
            out.align = 2
        else:
            builder.store(args[2], builder.bitcast(pointer, VF.as_pointer())).align = 4
        return context.get_dummy_value()

    return types.void(array, types.intp, vec), codegen


@intrinsic
def store_int8(typingctx: Any, byte_address: Any, value: Any) -> Any:
    """Write sixteen integers of -128..127 as bytes to an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        small = builder.trunc(builder.fptosi(args[1], VI), ir.VectorType(I8, LANES))
        builder.store(small, builder.inttoptr(args[0], small.type.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, vec), codegen


@intrinsic
def copy_word(typingctx: Any, source: Any, i: Any, target: Any, j: Any) -> Any:
    """Copy four bytes, two bf16 or one float32, between arrays of one dtype."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        places = [
            builder.bitcast(_element_pointer(context, builder, sig.args[n], args[n], args[n + 1]), I32.as_pointer())
            for n in (0, 2)
        ]
        word = builder.load(places[0])
        word.align = 2
        builder.store(word, places[1]).align = 2
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp), codegen


@intrinsic
def copy_values(typingctx: Any, source: Any, i: Any, target: Any, j: Any, half: Any) -> Any:
    """Copy sixteen elements to sixteen words of four bytes; of bf16, to the low (half 0) or high half of each word.

    The other halves are not touched, not even written back: they belong to another row, which another thread may be
    writing.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        from_, to = (_element_pointer(context, builder, sig.args[n], args[n], args[n + 1]) for n in (0, 2))
        if sig.args[0].dtype != types.uint16:
            new = builder.load(builder.bitcast(from_, VI.as_pointer()))
            new.align = 4
            builder.store(new, builder.bitcast(to, VI.as_pointer())).align = 4
            return context.get_dummy_value()
        i16, wide = ir.IntType(16), ir.VectorType(ir.IntType(16), 2 * LANES)
        mask = ir.VectorType(ir.IntType(1), 2 * LANES)
        value = builder.load(builder.bitcast(from_, VI16.as_pointer()))
        value.align = 2
        twice = ir.Constant(ir.VectorType(I32, 2 * LANES), [lane // 2 for lane in range(2 * LANES)])
        value = builder.shuffle_vector(value, ir.Constant(VI16, ir.Undefined), twice)
        half = builder.insert_element(ir.Constant(wide, ir.Undefined), builder.trunc(args[4], i16), ir.Constant(I32, 0))
        half = builder.shuffle_vector(half, half, ir.Constant(ir.VectorType(I32, 2 * LANES), [0] * (2 * LANES)))
        chosen = builder.icmp_unsigned("==", half, ir.Constant(wide, [0, 1] * LANES))
        signature = ir.FunctionType(ir.VoidType(), [wide, wide.as_pointer(), I32, mask])
        store = cgutils.get_or_insert_function(builder.module, signature, "llvm.masked.store.v32i16.p0")
        builder.call(store, [value, builder.bitcast(to, wide.as_pointer()), ir.Constant(I32, 2), chosen])
        return context.get_dummy_value()

    return types.void(source, types.intp, target, types.intp, types.intp), codegen


@intrinsic
def fetch_to_write(typingctx: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of an element that will be written soon."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        prefetch(builder, _element_pointer(context, builder, sig.args[0], args[0], args[1]), write=True, locality=3)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to an int64 element in one indivisible step and return what it was; orders memory on both sides."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.atomic_rmw("add", pointer, args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    """Read an int64 element that other threads write; what they wrote before it is visible after it."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, sig.args[0], args[0], args[1])
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(array, types.intp), codegen


@intrinsic
def pause(typingctx: Any) -> Any:
    """Tell the core that this is a waiting loop."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if IS_X86:
            call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_thread(typingctx: Any) -> Any:
    """Let another thread have this CPU."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        if HAS_SCHED_YIELD:
            call(builder, "sched_yield", I32, [])
        return context.get_dummy_value()

    return types.void(), codegen


# -- calls by address ------------------------------------------------------------------------------------------------


def call_address(builder: Any, function: Any, args: Any) -> None:
    """Emit a call of void(int64, ...) at an address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(args))
    builder.call(builder.inttoptr(function, kind.as_pointer()), list(args))


@intrinsic
def call_entry(typingctx: Any, function: Any, thread: Any, threads: Any, arguments: Any) -> Any:
    """Call void(thread, threads, arguments) at an address."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        call_address(builder, args[0], args[1:])
        return context.get_dummy_value()

    return types.void(*([types.int64] * 4)), codegen


def _view_type(element: Any, *, matrix: bool) -> Any:
    """An intrinsic that makes an array of the memory at an address. Nobody checks its length."""

    def view(typingctx: Any, byte_address: Any, columns: Any) -> Any:
        array_type = types.Array(element, 2 if matrix else 1, "C")

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            array = context.make_array(array_type)(context, builder)
            size = context.get_abi_sizeof(context.get_data_type(element))
            item, one = ir.Constant(I64, size), ir.Constant(I64, 1)
            populate_array(
                array,
                data=builder.inttoptr(args[0], context.get_data_type(element).as_pointer()),
                shape=[one, args[1]] if matrix else [args[1]],
                strides=[builder.mul(args[1], item), item] if matrix else [item],
                itemsize=item,
                meminfo=None,
            )
            return array._getvalue()

        return array_type(types.int64, types.int64), codegen

    return intrinsic(view)


bf16_view, float_view = _view_type(types.uint16, matrix=False), _view_type(types.float32, matrix=False)
int32_view, int64_view = _view_type(types.int32, matrix=False), _view_type(types.int64, matrix=False)
int32_matrix, int64_matrix = _view_type(types.int32, matrix=True), _view_type(types.int64, matrix=True)
int8_view, double_view = _view_type(types.int8, matrix=False), _view_type(types.float64, matrix=False)


# -- floats in order -------------------------------------------------------------------------------------------------


@intrinsic
def order_key(typingctx: Any, value: Any) -> Any:
    """Return an integer per float32 that orders as they do: neighbouring floats have neighbouring keys."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], I32)
        flipped = builder.xor(bits, ir.Constant(I32, 0x7FFFFFFF))
        return builder.sext(builder.select(builder.icmp_signed("<", bits, ir.Constant(I32, 0)), flipped, bits), I64)

    return types.int64(types.float32), codegen


@intrinsic
def order_value(typingctx: Any, key: Any) -> Any:
    """Return the float32 whose :func:`order_key` this is."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.trunc(args[0], I32)
        flipped = builder.xor(bits, ir.Constant(I32, 0x7FFFFFFF))
        bits = builder.select(builder.icmp_signed("<", bits, ir.Constant(I32, 0)), flipped, bits)
        return builder.bitcast(bits, F32)

    return types.float32(types.int64), codegen


@intrinsic
def any_in_range(typingctx: Any, a: Any, low: Any, high: Any) -> Any:
    """Tell whether any lane of a lies in [low, high) of the same lane."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        below = builder.fcmp_ordered("<", args[0], args[2])
        inside = builder.and_(builder.fcmp_ordered(">=", args[0], args[1]), below)
        mask = ir.IntType(LANES)
        return builder.icmp_unsigned("!=", builder.bitcast(inside, mask), ir.Constant(mask, 0))

    return types.boolean(vec, vec, vec), codegen


@intrinsic
def reduce_add_double(typingctx: Any, a: Any) -> Any:
    """Sum of the lanes in float64, always in the same order."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        wide = builder.fpext(args[0], ir.VectorType(ir.DoubleType(), LANES))
        return _reduce(builder, wide, lambda b, x, y: b.fadd(x, y))

    return types.float64(vec), codegen
